"""`polymux models`: the families that polymux has declarations for, and what each can do."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from polymux.families import all_families

HELP = "list the families of models that are known, and what each supports"
USAGE = "polymux models [--pipelines]"

_HEADINGS = ("FAMILY", "MAKES", "TASKS", "BATCHED", "NOT BATCHED, BECAUSE")
_PHASES = ("encoder", "denoiser", "decoder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipelines", action="store_true", help="list the pipeline classes of each family too")


def run(arguments: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [_HEADINGS]
    pipelines: list[tuple[str, ...]] = [()]
    for family in sorted(all_families(), key=lambda f: f.name):
        batched = ", ".join(phase for phase in _PHASES if phase in family.merge) or "-"
        tasks = ", ".join(family.tasks) or "-"
        rows.append((family.name, family.modality, tasks, batched, family.unmerged_because or ""))
        pipelines.append(family.pipelines)
    for line, names in zip(_table(rows), pipelines, strict=True):
        print(line)
        if arguments.pipelines:
            for name in names:
                print(f"    {name}")
    print("\nAny other diffusers pipeline runs too, its requests interleaved, not batched.")
    return 0


def _table(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

"""Times and memory of a step, as rows of a Markdown table and as JSON in the folder that OUT names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


class Clock:
    """Seconds on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object], runs: int = 1) -> float:
        """Per run, of `runs` one behind the other, as the steps of a request are."""
        self.sync()
        start = time.perf_counter()
        for _ in range(runs):
            action()
        self.sync()
        return (time.perf_counter() - start) / runs

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak(self) -> float:
        """GiB of the device, at most since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == "cuda" else 0.0


def host_memory(*kinds: str) -> dict[str, float]:
    """GiB of this process, by the kernel's words: Pss, Private_Dirty, ..."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return {name.rstrip(":"): int(kib) / 2**20 for name, kib, _ in lines if name.rstrip(":") in kinds}


class Table:
    """Rows with the same columns, printed as they come."""

    def __init__(self, title: str, columns: tuple[str, ...]) -> None:
        self.title, self.columns = title, columns
        self.rows: list[dict[str, Any]] = []
        print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def add(self, **values: Any) -> None:
        row = {column: values.get(column.replace(" ", "_")) for column in self.columns}
        self.rows.append(row)
        print(f"| {' | '.join(_cell(value) for value in row.values())} |", flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def save(name: str, tables: list[Table], **facts: Any) -> None:
    if "OUT" in os.environ:
        Path(os.environ["OUT"]).mkdir(parents=True, exist_ok=True)
        content = facts | {table.title: table.rows for table in tables}
        Path(os.environ["OUT"], name).write_text(json.dumps(content, indent=1))

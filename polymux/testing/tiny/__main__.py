"""Command line of the tiny checkpoints.

python -m polymux.testing.tiny list
python -m polymux.testing.tiny make   NAME DIR [--dtype fp32|bf16] [--seed 0] [--shard 200KB] [--published]
python -m polymux.testing.tiny check  NAME DIR     make, load again, run once, print one JSON line
python -m polymux.testing.tiny golden NAME DIR     as check, and write the output to DIR/NAME.golden.safetensors
python -m polymux.testing.tiny lora   NAME DIR     write DIR/NAME-lora, check that it acts
python -m polymux.testing.tiny audit  NAME DIR     which tensors does the smoke call's output not depend on?

NAME may be "all", "diffusers", "modular", "transformers" or several names joined by commas.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polymux.errors import ConfigError
from polymux.testing.tiny import TINY, Ctx, make
from polymux.testing.tiny.driver import audit, check
from polymux.testing.tiny.lora import check_lora
from polymux.testing.tiny.registry import select

Action = Callable[[str, Path, Ctx], dict[str, Any]]
ACTIONS: dict[str, Action] = {
    "check": check,
    "golden": functools.partial(check, golden=True),
    "lora": check_lora,
    "audit": audit,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(
        prog="python -m polymux.testing.tiny", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("action", choices=["list", "make", *ACTIONS])
    ap.add_argument("names", nargs="?", default="all", metavar="NAME")
    ap.add_argument("out", nargs="?", default="tiny-models", type=Path, metavar="DIR")
    ap.add_argument("--dtype", choices=DTYPES, default="fp32")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--shard", help="max shard size, such as 200KB, to get sharded weights with an index")
    ap.add_argument("--published", action="store_true", help="names and tokenizer files as in published repositories")
    return ap


def _report(action: Action, name: str, out: Path, ctx: Ctx) -> bool:
    """Run one action and print its report; a checkpoint that fails does not stop the others."""
    try:
        report = action(name, out, ctx)
    except Exception as error:
        traceback.print_exc()
        report = {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(report), flush=True)
    return bool(report["ok"])


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.action == "list":
        for spec in TINY.values():
            print(spec.name, spec.kind, *(["needs-torchvision"] if spec.needs_torchvision else []))
        return 0
    ctx = Ctx(args.seed, DTYPES[args.dtype], args.shard, args.published)
    try:
        specs = select(args.names.split(","))
        if args.action == "make":
            for spec in specs:
                print(make(spec.name, args.out, ctx), flush=True)
            return 0
    except ConfigError as error:
        parser.error(error.message)
    passed = [_report(ACTIONS[args.action], spec.name, args.out, ctx) for spec in specs]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

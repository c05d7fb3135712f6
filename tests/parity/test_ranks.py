"""Tiny pipelines on two and three ranks: the outputs of one rank, whatever is divided and however."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
TOLERANCE = 1e-4
RUN_S = 400

# What they are here for.
GUIDED = {
    "qwen-image": "two calls per step, of other lengths",
    "wan21-t2v": "two calls per step; video, decoded frame by frame",
    "sdxl": "one call per step, of both branches",
    "flux-schnell": "no guidance: requests share the ranks",
    "kandinsky5-t2i": "calls that are not merged",
    "z-image": "lists of samples",
    "chroma": "calls with the same arguments but one",
}
THREE = {"ltx2": "three calls per step"}


@pytest.fixture(scope="module")
def results(tiny_checkpoint: Callable[..., Path]) -> Callable[[int, tuple[str, ...]], dict[str, Any]]:
    """What `rank_driver` says about pipelines, by their names. Starting ranks takes long, so all are run at once."""
    known: dict[int, dict[str, Any]] = {}

    def get(size: int, names: tuple[str, ...]) -> dict[str, Any]:
        if size not in known:
            (folder,) = {tiny_checkpoint(name).parent for name in names}
            words = ["-m", "parity.rank_driver", json.dumps({"cfg_parallel_size": size}), str(folder), *names]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
            done = subprocess.run(
                [sys.executable, *words], cwd=TESTS, env=environment, capture_output=True, text=True, timeout=RUN_S
            )
            assert done.returncode == 0, done.stderr
            known[size] = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
        return known[size]

    return get


@pytest.mark.parametrize("name", GUIDED)
def test_two_ranks(name: str, results: Callable[..., dict[str, Any]]) -> None:
    check(results(2, tuple(GUIDED))[name])


@pytest.mark.parametrize("name", THREE)
def test_three_ranks(name: str, results: Callable[..., dict[str, Any]]) -> None:
    check(results(3, tuple(THREE))[name])


def check(result: dict[str, Any]) -> None:
    assert result["distance"] <= TOLERANCE
    assert result["outputs"] == 3 and result["aborted"]
    assert result["divided"] > 0 and not result["undivided"]

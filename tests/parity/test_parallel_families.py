"""Tiny pipelines on several ranks: the outputs of one rank, whatever is divided and however."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

TESTS = Path(__file__).parent.parent
TOLERANCE = 1e-4
RUN_S = 500

GUIDED = {
    "qwen-image": "two calls per step, of other lengths",
    "wan21-t2v": "two calls per step; video, decoded frame by frame",
    "sdxl": "one call per step, of both branches",
    "flux-schnell": "no guidance: requests share the ranks",
    "z-image": "lists of samples",
    "omnigen": "calls that are not merged",
    "ltx-video": "video",
    "wan21-vace": "arguments whose length is by chance that of several samples",
}
TWO: list[tuple[dict[str, Any], list[str]]] = [
    ({"cfg_parallel_size": 2}, [name for name in GUIDED if name != "sdxl"]),
    ({"cfg_parallel_size": 2, "text_encoder_tp_size": 2}, ["sdxl"]),
    ({"ulysses_degree": 2, "vae_patch_parallel_size": 2}, ["wan21-t2v"]),
    ({"ring_degree": 2}, ["qwen-image", "z-image"]),
    ({"tensor_parallel_size": 2}, ["wan21-t2v"]),
    ({"tensor_parallel_size": 2, "text_encoder_tp_size": 2}, ["flux-schnell"]),
    ({"cfg_parallel_size": 2, "use_hsdp": True}, ["qwen-image"]),
    ({"cfg_parallel_size": 2, "enable_distributed_layerwise_offload": True}, ["qwen-image"]),
    ({"ulysses_degree": 2, "enable_distributed_layerwise_offload": True}, ["wan22-t2v-moe"]),
]
FOUR: list[tuple[dict[str, Any], list[str]]] = [
    ({"cfg_parallel_size": 2, "ulysses_degree": 2}, ["wan21-t2v"]),
    ({"cfg_parallel_size": 2, "tensor_parallel_size": 2}, ["qwen-image"]),
    ({"ulysses_degree": 2, "ring_degree": 2, "use_hsdp": True, "hsdp_replicate_size": 2}, ["wan21-t2v"]),
]
Results = Callable[[str], dict[str, dict[str, Any]]]


def case(flat: dict[str, Any], name: str) -> str:
    return f"{name} {json.dumps(flat)}"


CASES = [
    (ranks, case(flat, name)) for ranks, work in (("2", TWO), ("4", FOUR)) for flat, names in work for name in names
]


@pytest.fixture(scope="module")
def results(tiny_checkpoint: Callable[..., Path], run_dir: Path) -> Results:
    """What `rank_driver` says about each case. Starting ranks takes long: those with one number of them run at once, in
    one of the tests' workers."""

    def get(ranks: str) -> dict[str, dict[str, Any]]:
        work, report = TWO if ranks == "2" else FOUR, run_dir / f"rank_driver_{ranks}.jsonl"
        with FileLock(report.with_suffix(".lock")):
            if not report.exists():
                report.write_text(_driven(work, {tiny_checkpoint(name).parent for _, names in work for name in names}))
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        cases = [case(flat, name) for flat, names in work for name in names]
        return dict(zip(cases, lines, strict=False))  # as far as it has come

    return get


def _driven(work: list[tuple[dict[str, Any], list[str]]], folders: set[Path]) -> str:
    (folder,) = folders
    words = [sys.executable, "-m", "parity.rank_driver", str(folder), json.dumps(work)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    done = subprocess.run(words, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.stdout


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_several_ranks(ranks: str, case: str, results: Results) -> None:
    result = results(ranks)[case]
    assert result["distance"] <= TOLERANCE
    assert result["outputs"] == 3 and result["aborted"]
    assert (result["divided"] > 0) == ("cfg_parallel_size" in result)
    assert not result["undivided"]
    assert ("all-gathered" in result["storage"]) == ("enable_distributed_layerwise_offload" in result)

"""Two ranks keep half of each block and rebuild it together, whatever each of them computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polymux.config import stage_environment

from .gather_worker import SCENARIOS

PATIENCE_S = 300


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str | None]:
    """What went wrong, by scenario and rank; all scenarios run in one pair of processes."""
    store = tmp_path_factory.mktemp("gather") / "store"
    command = [sys.executable, "-m", __name__.replace("test_gather_blocks", "gather_worker")]
    root = Path(__file__).parents[__name__.count(".")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store), "cpu"], stdout=subprocess.PIPE, cwd=root, env=stage_environment()
        )
        for rank in (0, 1)
    ]
    try:
        lines = [line for rank in ranks for line in rank.communicate(timeout=PATIENCE_S)[0].splitlines()]
    finally:
        for rank in ranks:
            rank.kill()
    found = [json.loads(line) for line in lines]
    return {(line["scenario"], line["rank"]): line["problem"] for line in found}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scenario", [s.__name__ for s in SCENARIOS])
def test_two_ranks(scenario: str, rank: int, problems: dict[tuple[str, int], str | None]) -> None:
    assert problems[(scenario, rank)] is None

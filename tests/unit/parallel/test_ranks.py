"""Models divided among two ranks, and among four, give what one rank gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from polymux.config import stage_environment

from .rank_worker import SCENARIOS

PATIENCE_S = 500
CASES = [(scenario.__name__, name, size) for size, scenarios in SCENARIOS.items() for scenario, name in scenarios]


@pytest.fixture(scope="module")
def problems(run_dir: Path) -> dict[tuple[str, str, int], list[str | None]]:
    """What went wrong on each rank, by scenario, checkpoint and number of ranks; all run once, in one go."""
    report, module = run_dir / "ranks.jsonl", __name__.replace("test_ranks", "rank_worker")
    root = Path(__file__).parents[__name__.count(".")]
    environment = stage_environment() | {"OMP_NUM_THREADS": "1"}
    with FileLock(run_dir / "ranks.lock"):
        if not report.exists():
            done = subprocess.run(
                [sys.executable, "-m", module], stdout=subprocess.PIPE, cwd=root, env=environment, timeout=PATIENCE_S
            )
            report.write_bytes(done.stdout)
    found: dict[tuple[str, str, int], list[str | None]] = {}
    for line in report.read_text().splitlines():
        said = json.loads(line)
        found.setdefault((said["scenario"], said["name"], said["size"]), []).append(said["problem"])
    return found


@pytest.mark.parametrize(("scenario", "name", "size"), CASES)
def test_ranks(scenario: str, name: str, size: int, problems: dict[tuple[str, str, int], list[str | None]]) -> None:
    assert problems[(scenario, name, size)] == [None] * size

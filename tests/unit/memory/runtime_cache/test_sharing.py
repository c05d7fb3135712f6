"""Several processes with one model take the memory of one model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polymux.config import stage_environment

MIB = 256


@pytest.mark.parametrize(("kind", "copies"), [("mapped", 1), ("private", 3)])
def test_three_processes_take_the_memory_of_one(tmp_path: Path, kind: str, copies: int) -> None:
    script = Path(__file__).parent / "pss_processes.py"
    command = [sys.executable, str(script), str(tmp_path / "cache"), str(MIB), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=stage_environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    taken = int(done.stdout) / 2**20
    assert 0.75 * copies * MIB < taken < 1.15 * copies * MIB

"""Starts `cache_worker.py` in a process of its own, and speaks with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from cache_worker import Job

from polymux.config import stage_environment

Start = Callable[[Job], "Worker"]


class Worker:
    """One process. `go` lets it begin; `result` waits until it has done its part."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, str(Path(__file__).parent / "cache_worker.py"), msgspec.json.encode(job).decode()]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=stage_environment(),
        )
        assert self._line() == "ready"

    def go(self) -> Worker:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self

    def result(self) -> dict[str, Any]:
        line = self._line()
        assert line, self.log()
        return dict(json.loads(line))

    def log(self) -> str:
        """What it wrote to its log, after its end."""
        return self.process.communicate()[1]

    def end(self) -> int:
        """Let it go, and wait until it has gone."""
        self.process.communicate()
        return self.process.returncode

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

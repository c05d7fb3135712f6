"""Workers of the runtime cache in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_process import Start, Worker
from cache_worker import Job


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers, and ends those that are left."""
    workers: list[Worker] = []

    def make(job: Job) -> Worker:
        workers.append(Worker(job))
        return workers[-1]

    yield make
    for worker in workers:
        worker.process.kill()
        worker.process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(root=str(tmp_path / "cache"))

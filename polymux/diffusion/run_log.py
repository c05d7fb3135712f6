"""Counts of the runs of components: how many calls each answered, and how long it took.

A run on a GPU has its time when the device has finished it; until then the run waits here to be read. Nobody waits for
the device on its account.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from polymux.diffusion.call import Call, Phase
from polymux.diffusion.timing import Elapsed
from polymux.metrics.catalog import RUN_S
from polymux.request import ComponentRuns, Distribution


@dataclass
class _Runs:
    batches: dict[int, int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0] * (len(RUN_S) + 1))
    seconds: float = 0.0

    def took(self, seconds: float) -> None:
        self.counts[bisect_left(RUN_S, seconds)] += 1
        self.seconds += seconds


class RunLog:
    """Of one engine."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, Phase], _Runs] = {}
        self._unread: deque[tuple[_Runs, Elapsed]] = deque()

    def add(self, call: Call, size: int, elapsed: Elapsed) -> None:
        """A run has answered `call` and others like it, `size` in all."""
        self.count(call.component.name, call.phase, size, elapsed)

    def count(self, component: str, phase: Phase, size: int, elapsed: Elapsed) -> None:
        """A run of a component was for so many requests."""
        runs = self._runs.setdefault((component, phase), _Runs())
        runs.batches[size] = runs.batches.get(size, 0) + 1
        self._unread.append((runs, elapsed))

    def read(self) -> list[ComponentRuns]:
        """What has run so far, by component and phase."""
        while self._unread and self._unread[0][1].known:
            runs, elapsed = self._unread.popleft()
            runs.took(elapsed())
        return [
            ComponentRuns(name, phase, dict(runs.batches), Distribution(list(runs.counts), runs.seconds))
            for (name, phase), runs in self._runs.items()
        ]

"""How long calls take, without waiting for the device.

On a GPU a call returns before it has run, so its time is the distance between two events, read when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Seconds = Callable[[], float]


class Elapsed:
    """The seconds between two events of a GPU, or, of a CPU, two points in time."""

    def __init__(self, seconds: float, events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None) -> None:
        self._seconds, self._events = seconds, events

    @property
    def known(self) -> bool:
        """Whether to ask for it takes no waiting."""
        return self._events is None or bool(self._events[1].query())  # type: ignore[no-untyped-call]

    def __call__(self) -> float:
        """The seconds; waits for the device if it must."""
        if self._events is not None:
            begin, end = self._events
            end.synchronize()
            self._seconds, self._events = float(begin.elapsed_time(end)) / 1000, None
        return self._seconds


class Stopwatch:
    """Started when made."""

    def __init__(self, device: torch.device) -> None:
        self.begin: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.begin.record()
        self.start = time.perf_counter()

    def stop(self) -> Elapsed:
        seconds = time.perf_counter() - self.start
        if self.begin is None:
            return Elapsed(seconds)
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end.record()
        return Elapsed(seconds, (self.begin, end))

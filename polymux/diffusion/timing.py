"""How long calls take, without waiting for the device.

On a GPU a call returns before it has run, so its time is the distance between two events, read when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Seconds = Callable[[], float]


class Stopwatch:
    """Started when made; `stop` gives a function that tells the seconds between, waiting for the device if it must."""

    def __init__(self, device: torch.device) -> None:
        self.begin: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.begin.record()
        self.start = time.perf_counter()

    def stop(self) -> Seconds:
        if self.begin is None:
            seconds = time.perf_counter() - self.start
            return lambda: seconds
        begin, end = self.begin, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000

        return elapsed

"""Notices a stage that has work and gives no sign of progress: a kernel that hangs, a process that is stopped.

Counts in ticks of sleep and not by the clock: if it is this process that was stopped for an hour, no more than one tick
has passed for the stage. Knows no messages; whoever gets one says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICKS = 8  # per timeout


class Watchdog:
    """One per stage process."""

    def __init__(self, timeout: float, has_work: Callable[[], bool]) -> None:
        """`timeout` in seconds; 0 switches it off."""
        self._tick = timeout / TICKS
        self._has_work = has_work
        self._silent = 0

    def heard(self) -> None:
        """The stage gave a sign."""
        self._silent = 0

    async def until_hung(self) -> None:
        """Returns when the stage has had work, and given no sign, for the whole time."""
        if self._tick == 0:
            await asyncio.Event().wait()
        while self._silent <= TICKS:  # one more: the work may have come at the end of the first
            await asyncio.sleep(self._tick)
            self._silent = self._silent + 1 if self._has_work() else 0

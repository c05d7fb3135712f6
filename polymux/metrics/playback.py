"""Somebody who plays sound as it comes, from the first piece on, and what of that they hear.

Knows seconds; neither requests nor samples.
"""

from __future__ import annotations


class Playback:
    """Of one stream of sound."""

    def __init__(self) -> None:
        self.first: float | None = None  # when the first piece came
        self.last = 0.0  # when the last one did
        self.sound = 0.0  # seconds that have come
        self.breaks = 0  # times that there was nothing to play before the end
        self.silence = 0.0  # how long these were together
        self._until = 0.0  # when all that has come is played

    def came(self, now: float, seconds: float) -> None:
        """A piece of sound has come."""
        if self.first is None:
            self.first = self._until = now
        elif now > self._until:
            self.breaks += 1
            self.silence += now - self._until
            self._until = now
        self.last = now
        self.sound += seconds
        self._until += seconds

"""Where somebody speaks in a sound that is still coming: by its energy, and by nothing else.

A frame is loud or quiet; enough loud ones in a row begin a turn, enough quiet ones end it. Music and noise above the
threshold are speech to it, a faint voice below is not. Positions count samples from the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polymux.media.wire import Array

FRAME_MS = 20
BEGINS_MS = 100  # of loud frames in a row; a click is shorter
LOWEST_DB, RANGE_DB = -70.0, 60.0  # of full scale: the threshold 0, and what lies between it and 1
_FULL = 32768.0


@dataclass(frozen=True)
class Edge:
    """A turn begins with the sample `at`, or is over before it."""

    kind: Literal["began", "ended"]
    at: int


class VoiceActivity:
    """One stream of 16-bit samples. `add` tells what has become certain."""

    def __init__(self, sample_rate: int, threshold: float, silence_ms: int, start: int = 0) -> None:
        """`threshold`: 0 to 1, of a frame's mean energy. `start`: the position of the first sample."""
        self._frame = sample_rate * FRAME_MS // 1000
        self._least = _FULL * 10 ** ((LOWEST_DB + RANGE_DB * threshold) / 20)
        self._begins = BEGINS_MS // FRAME_MS
        self._ends = max(1, math.ceil(silence_ms / FRAME_MS))
        self._rest = np.zeros(0, np.int16)  # less than a frame
        self._at = start
        self._run = 0  # frames in a row that speak against how it is
        self.speaking = False

    @property
    def quiet_until(self) -> int:
        """While nobody speaks: no turn will begin before this sample."""
        return self._at - self._run * self._frame

    def add(self, samples: Array) -> Iterator[Edge]:
        """int16 (samples,). Iterate to the end."""
        samples = np.concatenate([self._rest, samples])
        count = len(samples) // self._frame
        frames = samples[: count * self._frame].reshape(count, self._frame)
        self._rest = samples[count * self._frame :].copy()
        for loud in np.sqrt(np.square(frames.astype(np.float32)).mean(axis=1)) >= self._least:
            self._at += self._frame
            self._run = self._run + 1 if loud != self.speaking else 0
            if self._run < (self._ends if self.speaking else self._begins):
                continue
            self.speaking = not self.speaking
            begins, self._run = self._at - self._run * self._frame, 0
            yield Edge("began", begins) if self.speaking else Edge("ended", self._at)

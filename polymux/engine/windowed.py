"""A decoder that gets its frames in chunks and makes the same samples as of all of them at once.

Each sample depends on so many frames before and after it: a chunk is decoded together with these, and what they make is
cut away. Knows arrays; how a decoder works is a function's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polymux.families.generate import FrameShape
from polymux.families.graph import Arrays

Array = np.ndarray[Any, Any]


class Windowed:
    """Of one sentence. `decode`: (channels, samples) of arrays whose last axis is frames."""

    def __init__(self, shape: FrameShape, decode: Callable[[Arrays], Array]) -> None:
        self._shape, self._decode = shape, decode
        self._kept: Arrays = {}  # frames from `_first` on
        self._first = 0
        self._done = 0  # frames whose samples are out

    def push(self, arrays: Arrays, last: bool) -> Array | None:
        """The samples that are certain now; None: none are."""
        known = {name: array for name, array in arrays.items() if array.shape[-1]}
        if known:
            kept = self._kept
            self._kept = {n: np.concatenate([kept[n], a], -1) if n in kept else a for n, a in known.items()}
        count = self._first + next((array.shape[-1] for array in self._kept.values()), 0)
        end = count if last else count - self._shape.after
        if end <= self._done:
            return None
        samples = self._decode(self._kept)
        start = (self._done - self._first) * self._shape.hop
        out = samples[:, start : None if last else (end - self._first) * self._shape.hop]
        self._done = end
        first = max(end - self._shape.before, self._first)
        self._kept = {name: array[..., first - self._first :] for name, array in self._kept.items()}
        self._first = first
        return out

"""A decoder that gets its frames in chunks and makes the same samples as of all of them at once.

What a sample depends on, the family says: so many frames before and after it, frames before it in blocks, or all of
them. A chunk is decoded together with those, and what they make is cut away. Knows arrays; how a decoder works is a
function's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from polymux.families.generate import BlockShape, DecoderShape, FrameShape
from polymux.families.graph import Arrays

Array = np.ndarray[Any, Any]


Decode = Callable[[Arrays], Array]


class Window(Protocol):
    """Of one sentence."""

    def push(self, arrays: Arrays, last: bool) -> Array | None:
        """The samples that are certain now; None: none are."""
        ...


def window_of(shape: DecoderShape, decode: Decode) -> Window:
    """`decode`: (channels, samples) of arrays."""
    if isinstance(shape, FrameShape):
        return Windowed(shape, decode)
    return Blocked(shape, decode) if isinstance(shape, BlockShape) else Gathered(decode)


class Windowed:
    """Each sample depends on so many frames before and after it. `decode`: of arrays whose last axis is frames."""

    def __init__(self, shape: FrameShape, decode: Decode) -> None:
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


class Blocked:
    """Samples depend on frames before them, by blocks: what has come of a block is decoded from its begin on."""

    def __init__(self, shape: BlockShape, decode: Decode) -> None:
        self._shape, self._decode = shape, decode
        self._kept: Arrays = {}  # the context of the present block, and what has come of it
        self._context = 0  # frames
        self._out = 0  # samples of the present block that are out

    def push(self, arrays: Arrays, last: bool) -> Array | None:
        """The samples that are certain now; None: none are."""
        made: list[Array] = []
        room = self._shape.block - (self._frames - self._context)
        self._take({name: array[..., :room] for name, array in arrays.items()}, made)
        for start in range(room, next((array.shape[-1] for array in arrays.values()), 0), self._shape.block):
            self._begin()
            self._take({name: array[..., start : start + self._shape.block] for name, array in arrays.items()}, made)
        return np.concatenate(made, axis=1) if made else None

    @property
    def _frames(self) -> int:
        return next((array.shape[-1] for array in self._kept.values()), 0)

    def _take(self, arrays: Arrays, made: list[Array]) -> None:
        before = self._frames
        self._kept = {
            n: np.concatenate([self._kept[n], a], -1) if n in self._kept else a for n, a in arrays.items()
        } or (self._kept)
        if self._frames == before:
            return
        samples = self._decode(self._kept)[:, self._context * self._shape.hop + self._out :]
        self._out += samples.shape[1]
        made.append(samples)

    def _begin(self) -> None:
        """The next block, after a complete one."""
        self._kept = {name: array[..., -self._shape.context :] for name, array in self._kept.items()}
        self._context, self._out = self._frames, 0


class Gathered:
    """Samples depend on all frames, which come in one chunk."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._kept: Arrays = {}

    def push(self, arrays: Arrays, last: bool) -> Array | None:
        self._kept = {**self._kept, **arrays}
        return self._decode(self._kept) if last and self._kept else None

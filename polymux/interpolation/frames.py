"""Where the frames between stand: a video of n frames becomes one of (n - 1) * 2^exp + 1, made a few at a time.

Any rows of the longer video can be made by themselves, so that it never exists as a whole. The frames that were there
are handed on as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from polymux.interpolation.network import FlowNetwork

Frames = Any  # a tensor or a numpy array; its first axis counts frames, and slicing it copies nothing


@dataclass(frozen=True)
class Smoothing:
    """One video's share: which network, and how many frames it makes."""

    network: FlowNetwork
    factor: int  # frames for one that was there
    scale: float

    def count(self, frames: int) -> int:
        return (frames - 1) * self.factor + 1

    def rows(self, frames: Frames, start: int, end: int, channels_first: bool) -> Frames:
        """Rows of the longer video. Tensors of floats come as float32, everything else in the type of `frames`."""
        parts = list(self._parts(frames, start, min(end, self.count(len(frames))), channels_first))
        if isinstance(frames, torch.Tensor):
            return torch.cat([part.to(frames.device) for part in parts])
        return np.concatenate([_array(part, frames.dtype) for part in parts])

    def _parts(self, frames: Frames, start: int, end: int, channels_first: bool) -> Iterator[Frames]:
        for row in range(start, end):
            pair, step = divmod(row, self.factor)
            if step == 0:
                yield _as_float(frames[pair : pair + 1])
            else:
                yield self._between(frames[pair : pair + 2], step / self.factor, channels_first)

    @torch.no_grad()
    def _between(self, pair: Frames, moment: float, channels_first: bool) -> torch.Tensor:
        """(1, ...) in the axes of `pair`; bytes if that is of bytes."""
        near = next(self.network.parameters())
        given = torch.as_tensor(pair)
        values = given.to(near.device, near.dtype) / (255 if given.dtype == torch.uint8 else 1)
        both = (values if channels_first else values.permute(0, 3, 1, 2)).clamp(0, 1)
        height, width = both.shape[-2:]
        multiple = self.network.multiple(self.scale)
        margin = (0, -width % multiple, 0, -height % multiple)
        both = functional.pad(both, margin, mode="replicate")
        whole: torch.Tensor = self.network(both[:1], both[1:], moment, self.scale)
        made = whole[..., :height, :width].clamp(0, 1)
        made = made if channels_first else made.permute(0, 2, 3, 1)
        return made.mul(255).round().to(torch.uint8) if given.dtype == torch.uint8 else made.float()


def _as_float(frames: Frames) -> Frames:
    """Tensors of half precision as float32, which changes no value."""
    return frames.float() if isinstance(frames, torch.Tensor) and frames.is_floating_point() else frames


def _array(part: Frames, dtype: Any) -> Frames:
    return part.cpu().numpy().astype(dtype) if isinstance(part, torch.Tensor) else part

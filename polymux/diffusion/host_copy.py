"""Brings what a session made to the host, in parts of bounded size, beside the device's other work.

On a GPU the conversion to bytes and the copy run on a stream of their own, into pinned memory. Meant for a thread that
does nothing else; knows neither requests nor messages.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

from polymux.diffusion.outputs import Array, RawOutput, finite_array
from polymux.errors import GenerationError, NonFiniteOutputError
from polymux.interpolation.frames import Smoothing
from polymux.media.wire import to_wire
from polymux.request import ArrayData, Media

# Takes the rows of an array as they come: which medium, the shape of all of it, the first row, the rows.
PutRows = Callable[[int, tuple[int, ...], int, ArrayData], None]


class HostCopy:
    """One per engine, used from one thread; `mark` is for the engine's own."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def mark(self) -> torch.cuda.Event | None:
        """The moment up to which the device must have come before an output may be read."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @torch.no_grad()
    def run(self, raw: RawOutput, after: torch.cuda.Event | None, put: PutRows) -> list[Media]:
        """All media of the output; or none, if one is too large for a message: then `put` gets all of them, the sound
        first. Raises NonFiniteOutputError, what the device raises, and what `put` raises."""
        items = [_Item(value, raw.frames, raw.channels_first, raw.smoothing) for value in _stacked(raw)]
        items += [_Item(value, False, False) for value in raw.sound]
        with self._beside(after):
            if all(item.nbytes <= self._chunk_bytes for item in items):
                return [item.whole or self._rows(item, 0, item.shape[0]) for item in items]
            count = len(items) - len(raw.sound)
            for medium in [*range(count, len(items)), *range(count)]:
                item = items[medium]
                rows = max(1, self._chunk_bytes // item.row_bytes)
                for start in range(0, item.shape[0], rows):
                    put(medium, item.shape, start, self._rows(item, start, start + rows))
            return []

    @torch.no_grad()
    def part(self, frames: torch.Tensor, after: torch.cuda.Event | None, put: Callable[[int, ArrayData], None]) -> None:
        """Some frames of a video, with their channels first. `put` gets rows and the first one's place among them.
        Raises as `run` does."""
        item = _Item(frames, True, True)
        rows = max(1, self._chunk_bytes // item.row_bytes)
        with self._beside(after):
            for start in range(0, item.shape[0], rows):
                put(start, self._rows(item, start, start + rows))

    @contextlib.contextmanager
    def _beside(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None or after is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield

    def _rows(self, item: _Item, start: int, end: int) -> ArrayData:
        value = item.rows(start, end)
        if isinstance(value, torch.Tensor):
            value = self._to_host(_bytes_of(value, item.channels_first) if item.frames else value.detach().float())
        elif item.frames and value.dtype != np.uint8:
            value = (finite_array(value) * 255).round().clip(0, 255).astype(np.uint8)
        else:
            value = finite_array(value)
        wire = to_wire(value)
        assert isinstance(wire, ArrayData)
        return wire

    def _to_host(self, tensor: torch.Tensor) -> Array:
        """Its values, valid until the next call."""
        if tensor.is_floating_point():
            _check_finite(tensor)
        if tensor.device.type == "cpu":
            return tensor.contiguous().numpy()
        if len(self._pinned) < tensor.nbytes:
            self._pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        target = self._pinned[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return target.numpy()


class _Item:
    """One medium: its rows where they are, and its form as it travels."""

    def __init__(self, value: Any, frames: bool, channels_first: bool, smoothing: Smoothing | None = None) -> None:
        self.whole = to_wire(value) if isinstance(value, Image.Image) else None
        self.value = value if isinstance(value, torch.Tensor) else np.asarray(value)
        self.frames = frames and self.whole is None
        self.channels_first = self.frames and channels_first
        self.smoothing = smoothing
        shape = tuple(self.value.shape)
        if smoothing is not None:
            if self.whole is not None or len(shape) != 4 or shape[1 if self.channels_first else 3] != 3:
                raise GenerationError(f"no frames can be put between what the pipeline made, of shape {shape}")
            shape = (smoothing.count(shape[0]), *shape[1:])
        self.shape = (shape[0], *shape[2:], shape[1]) if self.channels_first else shape
        width = 1 if self.frames else 4 if isinstance(value, torch.Tensor) else self.value.dtype.itemsize
        self.row_bytes = max(1, math.prod(self.shape[1:]) * width)
        self.nbytes = self.row_bytes * self.shape[0] if self.shape else width

    def rows(self, start: int, end: int) -> Any:
        if self.smoothing is None:
            return self.value[start:end]
        return self.smoothing.rows(self.value, start, end, self.channels_first)


def _stacked(raw: RawOutput) -> list[Any]:
    """Frames that came as pictures of one size are one array, too."""
    pictures = [item for item in raw.main if isinstance(item, Image.Image)]
    if raw.frames and pictures and len(pictures) == len(raw.main):
        return [np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])]
    return raw.main


def _bytes_of(frames: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """Values of 0..1 as bytes (frames, height, width, channels), rounded as numpy rounds."""
    if frames.dtype != torch.uint8:
        frames = frames.detach().float()
        _check_finite(frames)
        frames = frames.mul(255).round_().clamp_(0, 255).to(torch.uint8)
    return (frames.permute(0, 2, 3, 1) if channels_first else frames).contiguous()


def _check_finite(tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise NonFiniteOutputError("the model produced NaN or infinity in its output")

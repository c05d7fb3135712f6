"""Where the bytes of block images can be read from, piece by piece and by several threads at once.

A source knows neither devices nor when a piece is wanted.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import torch

from polymux.errors import CacheError
from polymux.memory.base import Image, Layout
from polymux.memory.layout import dense_stride, tensor_at


class ByteSource(Protocol):
    """The images of a module's blocks."""

    @property
    def layout(self) -> Layout: ...

    @property
    def description(self) -> str:
        """For a line of the log: "the file ..."."""
        ...

    def read(self, index: int, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8, host memory) with block `index`'s image from `offset` on. Releases the interpreter's lock.

        What lies between tensors may come as it is in the source or stay what it was. Raises CacheError.
        """
        ...

    def close(self) -> None:
        """Give up what it reads from. Nothing may be read after it."""
        ...


class FileBytes:
    """Images that stand in a file, each one contiguous. The file's cached pages are shared by all processes that read
    it; reading copies out of them faster than a mapping does, which pays for every page that it touches."""

    def __init__(self, layout: Layout, name: str, fd: int, offsets: Sequence[int]) -> None:
        """`offsets`: where in the file each block's image begins. The descriptor is duplicated."""
        self.layout = layout
        self.description = f"the file {name}"
        self._fd = os.dup(fd)
        self._offsets = offsets

    def read(self, index: int, offset: int, out: torch.Tensor) -> None:
        view = out.numpy().data
        at = self._offsets[index] + offset
        while view.nbytes:
            try:
                count = os.preadv(self._fd, [view], at)
            except OSError as error:
                raise CacheError(f"{self.description} cannot be read: {error.strerror or error}") from None
            if count == 0:
                raise CacheError(f"{self.description} ends early, at {at} bytes: it was cut off while it was in use")
            view, at = view[count:], at + count

    def close(self) -> None:
        os.close(self._fd)


class TensorBytes:
    """Images that are put together from a module's own tensors on the host, such as views of a mapped checkpoint.

    Keeps the tensors' memory, whatever becomes of the module.
    """

    def __init__(self, module: torch.nn.Module, layout: Layout, description: str) -> None:
        self.layout = layout
        self.description = description
        self._blocks = [_Flat(module, image) for image in layout.blocks]

    def read(self, index: int, offset: int, out: torch.Tensor) -> None:
        self._blocks[index].read(offset, out)

    def close(self) -> None:
        self._blocks.clear()


class _Flat:
    """One block's tensors as runs of bytes."""

    def __init__(self, module: torch.nn.Module, image: Image) -> None:
        places = [place for place in image.places if place.nbytes]
        self._starts = [place.offset for place in places]
        self._runs = [_run(tensor_at(module, place.names[0])) for place in places]

    def read(self, offset: int, out: torch.Tensor) -> None:
        end = offset + out.numel()
        for k in range(max(0, bisect_right(self._starts, offset) - 1), len(self._runs)):
            start, run = self._starts[k], self._runs[k]
            if start >= end:
                break
            first, last = max(start, offset), min(start + run.numel(), end)
            if first < last:
                # Not copy_: its own threads would multiply with ours.
                ctypes.memmove(out.data_ptr() + first - offset, run.data_ptr() + first - start, last - first)


def _run(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes (uint8, one dimension) as they stand in its image; a view unless it has gaps."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} is not host memory")
    if dense_stride(tensor) != tensor.stride():
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

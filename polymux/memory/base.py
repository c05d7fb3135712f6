"""The border between the host side and the device side of block streaming: "bytes of block i".

A `Layout` says where each tensor of a module stands in the flat image of its block. A `HostBlocks` holds the images
and brings one into a device slot when asked. The device side (`block_stream`) decides which block, when and into which
slot; it does not know whether the bytes come from pinned memory, a file mapping or other ranks. A host side does not
know what a block computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

PAGE = 4096  # bytes; every image is a whole number of pages
ALIGN = 256  # bytes; every tensor of an image begins at a multiple of it, as memory from the device's allocator does


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor stands in an image. `stride` is as in the module: memory formats survive the round trip."""

    names: tuple[str, ...]  # in the module; more than one if the tensor is tied within its block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements, of a dense tensor; contiguous if the module's own was not dense
    offset: int  # bytes from the begin of the image
    nbytes: int

    def view(self, image: torch.Tensor) -> torch.Tensor:
        """This tensor in `image` (uint8, the image's size or more)."""
        flat = image[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Image:
    """The flat form of one block (or of all that is in no block): its tensors and its size with padding."""

    name: str  # the block's path in the module, "transformer_blocks.3"; "" for the rest
    places: tuple[TensorPlace, ...]
    nbytes: int  # a multiple of PAGE


@dataclass(frozen=True)
class Layout:
    """All parameters and buffers of a module, each in exactly one image.

    A tensor that two blocks share, or a block and the rest, belongs to the rest.
    """

    blocks: tuple[Image, ...]  # in the order in which a forward runs them
    rest: Image

    @property
    def largest(self) -> int:
        return max((block.nbytes for block in self.blocks), default=0)


class Arrival(Protocol):
    """A block on its way to a slot."""

    def wait(self) -> None:
        """Order the current stream behind the arrival (on a CPU: return when the bytes are there).

        Raises what kept them from coming.
        """
        ...


class HostBlocks(Protocol):
    """The bytes of a module's blocks, on the host side."""

    @property
    def layout(self) -> Layout: ...

    @property
    def slot_bytes(self) -> int:
        """The size a slot must have: `layout.largest`, or more if the way of transfer needs it."""
        ...

    @property
    def collective(self) -> bool:
        """Whether a fetch needs the same fetch on other ranks: then all must fetch in the same order."""
        ...

    @property
    def description(self) -> str:
        """For the log line that states the storage decision: "private pinned memory, 38.1 GiB"."""
        ...

    def expect(self, order: Sequence[int]) -> None:
        """The coming fetches go round these blocks in this order, from its begin. Advice only: a host side that works
        ahead starts to; any fetch must be answered right all the same, and from there on the round continues."""
        ...

    def fetch(self, index: int, slot: torch.Tensor, free: torch.cuda.Event | None) -> Arrival:
        """Start to bring block `index` into `slot` (uint8, `slot_bytes`), not before `free` has happened on the device.

        `free` is recorded already; None: the slot is free, or becomes free by an earlier fetch of this object into it.
        Returns at once where it can; transfers into the same slot happen in the order of the fetches. What is behind
        the image's end is left as it is or overwritten with padding.
        """
        ...

    def close(self) -> None:
        """Wait for what is on its way, then give the host memory back. No fetch may follow."""
        ...

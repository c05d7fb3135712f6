"""The simplest host side: blocks in pinned memory of this process, one copy to the device per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polymux.memory.base import Arrival, Image, Layout
from polymux.memory.layout import let_go, pack
from polymux.memory.pinned import PinnedBuffer
from polymux.memory.plan import size


class PrivateBlocks:
    """Implements `HostBlocks`. Takes the blocks' tensors over from `module`, which is left without them."""

    collective = False

    def __init__(self, module: torch.nn.Module, layout: Layout, device: torch.device) -> None:
        self.layout, self.slot_bytes = layout, layout.largest
        self._buffer = PinnedBuffer(sum(image.nbytes for image in layout.blocks))
        self._images = cut(self._buffer.tensor, layout.blocks)
        for image, memory in zip(layout.blocks, self._images, strict=True):
            pack(module, image, memory)
            let_go(module, image, device)
        self._copies = CopyStream(device)
        if device.type == "cuda":
            self._buffer.pin()

    @property
    def description(self) -> str:
        return f"private pinned memory, {size(self._buffer.nbytes)}"

    def image(self, index: int) -> torch.Tensor:
        """The bytes of a block (uint8), where they are."""
        return self._images[index]

    def expect(self, order: Sequence[int]) -> None:
        """Everything is always ready."""

    def fetch(self, index: int, slot: torch.Tensor, free: torch.cuda.Event | None) -> Arrival:
        return self._copies.copy(self._images[index], slot, free)

    def close(self) -> None:
        self._copies.synchronize()
        self._images = []
        self._buffer.close()


class CopyStream:
    """Copies from pinned memory beside the computation. On a CPU they happen at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, source: torch.Tensor, target: torch.Tensor, free: torch.cuda.Event | None) -> Arrival:
        """Copy all of `source` to the begin of `target`, after `free` and the earlier copies of this stream."""
        if self.stream is None:
            target[: source.numel()].copy_(source)
            return Arrived()
        if free is not None:
            self.stream.wait_event(free)
        with torch.cuda.stream(self.stream):
            target[: source.numel()].copy_(source, non_blocking=True)
            return Recorded(self.stream.record_event())

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class Arrived:
    """An `Arrival` that is over."""

    def wait(self) -> None:
        return None


class Recorded:
    """An `Arrival` that is over when an event has happened."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def cut(memory: torch.Tensor, images: Sequence[Image]) -> list[torch.Tensor]:
    """The parts of `memory` (uint8) that the images take, one behind the other."""
    return list(torch.split(memory, [image.nbytes for image in images]))

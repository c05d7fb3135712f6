"""A host side that several ranks share: each keeps its part of every block in pinned memory and brings only that over
its bus; the block is put together from all parts over the links between the devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from polymux.memory.base import ALIGN, Arrival, Layout
from polymux.memory.layout import align, let_go, pack
from polymux.memory.pinned import PinnedBuffer
from polymux.memory.plan import size
from polymux.memory.private_blocks import CopyStream, Recorded

LANDINGS = 2  # parts on the device: one is gathered while the next arrives


class GatherBlocks:
    """Implements `HostBlocks` for the ranks of `group`, which must all fetch in the same order.

    Takes the blocks' tensors over from `module`, which is left without them.
    """

    collective = True

    def __init__(self, module: torch.nn.Module, layout: Layout, device: torch.device, group: dist.ProcessGroup) -> None:
        self.layout, self._group, self._world = layout, group, group.size()
        sizes = [align(-(-image.nbytes // self._world), ALIGN) for image in layout.blocks]
        largest = max(sizes, default=0)
        self.slot_bytes = largest * self._world
        self._buffer = PinnedBuffer(sum(sizes))
        self._parts = list(torch.split(self._buffer.tensor, sizes))
        whole, rank = torch.zeros(self.slot_bytes, dtype=torch.uint8), group.rank()
        for image, part in zip(layout.blocks, self._parts, strict=True):
            pack(module, image, whole)
            part.copy_(whole[rank * part.numel() : (rank + 1) * part.numel()])
            let_go(module, image, device)
        self._copies = CopyStream(device)
        self._gathers = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._turn = 0
        if device.type == "cuda":
            self._buffer.pin()
            self._landings = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(LANDINGS)]
            now = torch.cuda.current_stream().record_event()
            self._landed = [now] * LANDINGS  # when a landing may be written again

    @property
    def description(self) -> str:
        return f"1/{self._world} of each block in pinned memory, {size(self._buffer.nbytes)}, all-gathered"

    def expect(self, order: Sequence[int]) -> None:
        """Everything is always ready."""

    def fetch(self, index: int, slot: torch.Tensor, free: torch.cuda.Event | None) -> Arrival:
        part = self._parts[index]
        target = slot[: part.numel() * self._world]
        if self._gathers is None:
            return _Gathered(dist.all_gather_into_tensor(target, part, group=self._group, async_op=True))
        self._turn = (self._turn + 1) % LANDINGS
        landing = self._landings[self._turn][: part.numel()]
        landed = self._copies.copy(part, landing, self._landed[self._turn])
        with torch.cuda.stream(self._gathers):
            landed.wait()
            if free is not None:
                self._gathers.wait_event(free)
            dist.all_gather_into_tensor(target, landing, group=self._group)
            done = self._gathers.record_event()
        self._landed[self._turn] = done
        return Recorded(done)

    def close(self) -> None:
        self._copies.synchronize()
        if self._gathers is not None:
            self._gathers.synchronize()
        self._parts = []
        self._buffer.close()


class _Gathered:
    """An `Arrival` of a collective between CPUs."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

"""Block streaming: a module computes while its next blocks are on their way from the host.

Each block's tensors are views into one slot of the ring for good, so nothing is re-bound per step and compiled code
stays valid (compile a block's `forward`, not the block: what happens here happens in hooks around it). When a block has
run, its slot is filled with the next block that lives there; the fill waits for the computation by an event, and the
computation for the fill by another. Nothing waits for the whole device.

Blocks may run in any order, more than once, or not at all: a block that is not in its slot is fetched when it is
needed. Where the bytes come from is the business of a `HostBlocks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from polymux.errors import GenerationError
from polymux.memory.base import Arrival, HostBlocks
from polymux.memory.layout import bind, let_go
from polymux.memory.slots import Slots, ring, successors

log = logging.getLogger(__name__)


class BlockStream:
    """The blocks of one module, streamed through `slots` except for those in `resident`."""

    def __init__(
        self, module: torch.nn.Module, source: HostBlocks, slots: Slots, resident: Collection[int] = ()
    ) -> None:
        self.source = source
        self.fetched = 0  # blocks brought into slots
        self.moved = 0  # their bytes
        self.missed = 0  # of these, the ones that nobody had asked for before they were needed
        self._module, self._slots = module, slots
        images = source.layout.blocks
        self._order = [i for i in range(len(images)) if i not in resident]
        self._resident = sorted(resident)
        self._kept: list[torch.Tensor] = []
        self._place: dict[int, int] = {}  # the slot of each streamed block
        self._next: dict[int, int] = {}  # the block that comes into its slot after it
        self._held: list[int | None] = []  # what is in each slot, or on its way there
        self._arrivals: list[Arrival | None] = []
        self._seen: list[int] = []
        self._handles = []
        for index in self._order:
            block = module.get_submodule(images[index].name)
            before, after = partial(self._hook, self._before, index), partial(self._hook, self._after, index)
            self._handles.append(block.register_forward_pre_hook(before, prepend=True))
            self._handles.append(block.register_forward_hook(after))
        self.bind()

    @property
    def device_bytes(self) -> int:
        """Of the resident blocks; the slots are counted where they are shared."""
        return sum(memory.numel() for memory in self._kept)

    @property
    def ready(self) -> bool:
        """Whether a pass could begin without fetching first."""
        return self._slots.user is self

    def bind(self) -> None:
        """Bind the module's blocks to device memory; the slots are allocated."""
        if self._resident:
            self.source.expect(self._resident)
        self._kept = [self._load(index) for index in self._resident]
        self._arrange(self._order)

    def let_go(self) -> None:
        """The opposite of `bind`: afterwards nothing of the blocks is on the device."""
        self.stand_back()
        for image in self.source.layout.blocks:
            let_go(self._module, image, self._slots.device)
        self._kept = []

    def detach(self) -> None:
        """Leave the module and the host side to another stream."""
        for handle in self._handles:
            handle.remove()
        self.stand_back()

    def close(self) -> None:
        self.detach()
        self.source.close()

    def begin(self) -> None:
        """A pass of the module is about to begin: get its first blocks on their way, if they are not there."""
        self._seen = []
        other = self._slots.user
        if other is not self:
            if isinstance(other, BlockStream):
                other.stand_back()
            self._slots.user = self
        for index in self._order[: self._slots.count]:
            self._want(index)

    def end(self) -> None:
        """The pass is over, however it went. If the blocks ran in another order than it was thought, learn it."""
        if self._seen != self._order and sorted(self._seen) == sorted(self._order):
            log.info("%s runs its blocks in an order of its own, from now on in ours too", type(self._module).__name__)
            self._arrange(self._seen)

    def stand_back(self) -> None:
        """Let the slots be written by others: what is on its way arrives first."""
        for arrival in self._arrivals:
            if arrival is not None:
                arrival.wait()
        self._forget()
        if self._slots.user is self:
            self._slots.user = None

    def _arrange(self, order: Sequence[int]) -> None:
        """Give every streamed block its slot."""
        places, images = ring(len(order), self._slots.count), self.source.layout.blocks
        self._order = list(order)
        self._place = dict(zip(order, places, strict=True))
        self._next = {order[p]: order[q] for p, q in enumerate(successors(places))}
        self._forget()
        for index, place in self._place.items():
            bind(self._module, images[index], self._slots.buffers[place])
        self.source.expect(self._order)

    def _forget(self) -> None:
        self._held = [None] * self._slots.count
        self._arrivals = [None] * self._slots.count

    def _load(self, index: int) -> torch.Tensor:
        """Bring a resident block to memory of its own, by way of the first slot."""
        image, slot = self.source.layout.blocks[index], self._slots.buffers[0]
        memory = torch.empty(image.nbytes, dtype=torch.uint8, device=self._slots.device)
        self.source.fetch(index, slot, self._now()).wait()
        memory.copy_(slot[: image.nbytes])
        bind(self._module, image, memory)
        return memory

    def _hook(self, action: Callable[[int], None], index: int, *_: Any) -> None:
        action(index)

    def _before(self, index: int) -> None:
        if self._slots.user is not self:  # run from outside of a pass
            self.begin()
        self._seen.append(index)
        place = self._place[index]
        if self._held[place] != index:
            self.missed += 1
            self._want(index)
        arrival, self._arrivals[place] = self._arrivals[place], None
        if arrival is not None:
            arrival.wait()

    def _after(self, index: int) -> None:
        self._want(self._next[index])

    def _want(self, index: int) -> None:
        """Start to fetch a block into its slot, unless it is there, once the computation so far has used the slot."""
        place = self._place[index]
        if self._held[place] != index:
            self._held[place] = index
            self._arrivals[place] = self.source.fetch(index, self._slots.buffers[place], self._now())
            self.fetched += 1
            self.moved += self.source.layout.blocks[index].nbytes

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event() if self._slots.device.type == "cuda" else None


class GatheredStream(BlockStream):
    """Block streaming where each fetch is a collective of several ranks: every pass fetches every streamed block once,
    in order, whatever the module does, and ranks with nothing to compute make an `idle_pass`."""

    _cursor = 0  # blocks of this pass that are done

    def begin(self) -> None:
        self._cursor = 0
        super().begin()

    def end(self) -> None:
        while self._cursor < len(self._order):
            self._skip()

    def idle_pass(self) -> None:
        """Take part in the fetches of a pass that other ranks compute."""
        self.begin()
        self.end()

    def _before(self, index: int) -> None:
        if self._slots.user is not self or index not in self._order[self._cursor :]:
            raise GenerationError(
                f"{type(self._module).__name__} runs {self.source.layout.blocks[index].name} out of turn: blocks that "
                "are gathered from several ranks must run in the declared order; use --dlo-no-use-allgather"
            )
        while self._order[self._cursor] != index:
            self._skip()
        super()._before(index)

    def _after(self, index: int) -> None:
        self._cursor += 1
        super()._after(index)

    def _skip(self) -> None:
        index = self._order[self._cursor]
        arrival = self._arrivals[self._place[index]]
        if arrival is not None:
            arrival.wait()
        self._after(index)

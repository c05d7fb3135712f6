"""The components of one engine and where their weights are: carries out a `Plan`.

The engine says before each call which component runs, and afterwards that it has run. Knows neither calls nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from polymux.memory.base import HostBlocks
from polymux.memory.block_stream import BlockStream, GatheredStream
from polymux.memory.containers import block_paths
from polymux.memory.exchange import Exchange
from polymux.memory.kept import Kept
from polymux.memory.layout import all_tensors, layout_of, move_others
from polymux.memory.plan import Part, Placement, Plan, Role
from polymux.memory.private_blocks import PrivateBlocks
from polymux.memory.slots import Slots


@dataclass(frozen=True)
class Tenant:
    """A component: its module, and the containers of blocks that its family declares."""

    name: str
    role: Role
    module: torch.nn.Module
    blocks: tuple[str, ...] = ()

    def paths(self) -> list[str]:
        return block_paths(self.module, self.blocks)

    def part(self, *, with_blocks: bool) -> Part:
        """Its sizes. Raises ConfigError if its blocks are asked for and it cannot be taken apart."""
        paths = self.paths() if with_blocks and self.role != "decoder" else []
        if not paths:
            return Part(self.name, self.role, sum({id(t): t.nbytes for _, t in all_tensors(self.module)}.values()))
        layout = layout_of(self.module, paths)
        sizes = tuple(image.nbytes for image in layout.blocks)
        return Part(self.name, self.role, layout.rest.nbytes + sum(sizes), sizes)


# Makes the host side of a component: of all its blocks, or only of those that `resident` does not list. Returns it with
# the indices, in its own layout, of the blocks that must be resident.
MakeBlocks = Callable[[Tenant, Sequence[str], Sequence[int], torch.device], tuple[HostBlocks, Sequence[int]]]


def private_blocks(
    tenant: Tenant, paths: Sequence[str], resident: Sequence[int], device: torch.device
) -> tuple[HostBlocks, Sequence[int]]:
    """Pinned memory for the streamed blocks alone; resident ones are part of the rest."""
    layout = layout_of(tenant.module, [path for index, path in enumerate(paths) if index not in resident])
    return PrivateBlocks(tenant.module, layout, device), ()


class Residency:
    """All components, placed. `tenants` are those of the plan; no two of them share tensors."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        plan: Plan,
        device: torch.device,
        make_blocks: MakeBlocks = private_blocks,
    ) -> None:
        self.plan, self.device = plan, device
        modules = {tenant.name: tenant for tenant in tenants}
        self._kept: list[Kept] = []
        self._streams: dict[str, BlockStream] = {}
        self._slots: Slots | None = None
        self._exchange: Exchange | None = None
        for placement in plan.placements:
            if placement.how == "resident":
                module = modules[placement.part.name].module
                if any(tensor.device != device for _, tensor in all_tensors(module)):
                    module.to(device)
                self._kept.append(Kept(module, device))
        if plan.groups:
            groups = [{name: modules[name].module for name in group} for group in plan.groups]
            self._exchange = Exchange(groups, device)
        streamed = [p for p in plan.placements if p.how == "streamed"]
        if streamed:
            self._stream([(modules[p.part.name], p) for p in streamed], make_blocks)

    def before(self, name: str) -> None:
        """The component is about to run: what it needs is on the device, or on its way in the right order."""
        if name in self._streams:
            self._streams[name].begin()
        elif self._exchange is not None and name in self._exchange:
            self._exchange.before(name)

    def after(self, name: str) -> None:
        """The component has run, or failed."""
        if name in self._streams:
            self._streams[name].end()

    def ready(self, name: str) -> bool:
        """Whether the component could run without moving another one out of the way."""
        if name in self._streams:
            return self._streams[name].ready
        return self._exchange is None or name not in self._exchange or self._exchange.ready(name)

    @property
    def moved(self) -> dict[str, int]:
        """Bytes of weights brought to the device for calls so far, by component."""
        streamed = {name: stream.moved for name, stream in self._streams.items()}
        return streamed if self._exchange is None else streamed | self._exchange.moved

    @property
    def late(self) -> dict[str, int]:
        """Streamed blocks that nobody had asked for before they were needed, by component."""
        return {name: stream.missed for name, stream in self._streams.items()}

    def idle_pass(self, name: str) -> None:
        """Take part in gathering the blocks of a component that other ranks run."""
        stream = self._streams.get(name)
        if isinstance(stream, GatheredStream):
            stream.idle_pass()

    def sleep(self) -> None:
        """Move all weights to the host. Raises ConfigError, with everything in place, if some cannot be moved."""
        try:
            if self.device.type == "cuda":  # on a CPU they are there
                for kept in self._kept:
                    kept.park()
        except BaseException:
            for kept in self._kept:
                kept.unpark()
            raise
        for stream in self._streams.values():
            stream.let_go()
        if self._slots is not None:
            self._slots.free()
        if self._exchange is not None:
            self._exchange.free()

    def wake(self) -> None:
        """The opposite of `sleep`. If it fails, for want of memory, everything sleeps on."""
        try:
            for kept in self._kept:
                kept.unpark()
            if self._slots is not None:
                self._slots.allocate()
            for stream in self._streams.values():
                stream.bind()
            if self._exchange is not None:
                self._exchange.allocate()
        except BaseException:
            self.sleep()
            raise

    def close(self) -> None:
        """Give host memory back. The modules are not to be used any more."""
        for stream in self._streams.values():
            stream.close()
        if self._exchange is not None:
            self._exchange.close()
        for kept in self._kept:
            kept.close()

    def describe(self) -> str:
        """The decision and its reason, in one line."""
        sources = sorted({stream.source.description for stream in self._streams.values()})
        return "; ".join([self.plan.describe(), *sources])

    def _stream(self, streamed: Sequence[tuple[Tenant, Placement]], make_blocks: MakeBlocks) -> None:
        sources = [
            make_blocks(tenant, tenant.paths(), placement.resident, self.device) for tenant, placement in streamed
        ]
        largest = max(source.slot_bytes for source, _ in sources)
        self._slots = Slots(self.plan.slots, largest, self.device)
        self._slots.allocate()
        for (tenant, _), (source, resident) in zip(streamed, sources, strict=True):
            rest = source.layout.rest
            in_blocks = [p for image in source.layout.blocks for p in image.places]
            move_others(tenant.module, in_blocks, self.device)
            self._kept.append(Kept(tenant.module, self.device, rest))
            kind = GatheredStream if source.collective else BlockStream
            self._streams[tenant.name] = kind(tenant.module, source, self._slots, resident)

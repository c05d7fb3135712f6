"""Model-level offload: groups of whole components that use the same device memory in turns.

A component's weights are packed into one pinned image once, and come to the device by one copy into memory that is
allocated once. They are never copied back: to evict a component is to forget where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from polymux.memory.layout import bind, image_of, let_go, move_others, pack
from polymux.memory.pinned import PinnedBuffer

# Smaller parameters stay on the device, and so do buffers. They are next to nothing, and what pipelines read past the
# engine (norms, statistics, learnt latents) is among them.
SMALL = 64 * 2**10  # bytes


class Exchange:
    """Groups of modules by name, of which one group at a time is on the device."""

    def __init__(self, groups: Sequence[Mapping[str, torch.nn.Module]], device: torch.device) -> None:
        self._members: dict[str, _Member] = {}
        self._group: dict[str, int] = {}
        self.moved: dict[str, int] = {}  # bytes to the device so far, by name
        self.nbytes = 0
        for number, group in enumerate(groups):
            offset = 0
            for name, module in group.items():
                self._members[name] = member = _Member(module, device, offset)
                self._group[name] = number
                offset += member.image.nbytes
            self.nbytes = max(self.nbytes, offset)
        self._device = device
        self._memory: torch.Tensor | None = None
        for name in self._members:
            self._members[name].watch(partial(self._outside, name))
        self.allocate()

    @property
    def device_bytes(self) -> int:
        return 0 if self._memory is None else self.nbytes

    @property
    def host_bytes(self) -> int:
        return sum(member.image.nbytes for member in self._members.values())

    def allocate(self) -> None:
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)

    def free(self) -> None:
        """Give the device memory back, until `allocate`."""
        for name in self._members:
            self._evict(name)
        self._memory = None

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def ready(self, name: str) -> bool:
        return self._members[name].loaded

    def before(self, name: str) -> None:
        """Have the component on the device for what is computed from now on."""
        member = self._members[name]
        if member.loaded:
            return
        assert self._memory is not None
        for other, group in self._group.items():
            if group != self._group[name]:
                self._evict(other)
        member.load(self._memory)
        self.moved[name] = self.moved.get(name, 0) + member.image.nbytes

    def close(self) -> None:
        self.free()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for member in self._members.values():
            member.close()

    def _evict(self, name: str) -> None:
        member = self._members[name]
        if member.loaded:
            member.evict()
            member.watch(partial(self._outside, name))

    def _outside(self, name: str, *_: Any) -> None:
        """A pipeline calls a part of a component by itself, past the engine."""
        self.before(name)


class _Member:
    """One module and its image on the host."""

    def __init__(self, module: torch.nn.Module, device: torch.device, offset: int) -> None:
        parameters = module.named_parameters(remove_duplicate=False)
        self.module, self.image = module, image_of((name, p) for name, p in parameters if p.nbytes >= SMALL)
        self.loaded = False
        self._device, self._offset = device, offset
        self._host = PinnedBuffer(self.image.nbytes)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        pack(module, self.image, self._host.tensor)
        let_go(module, self.image, device)
        move_others(module, self.image.places, device)
        if device.type == "cuda":
            self._host.pin()

    def watch(self, called: Any) -> None:
        """Have `called` run before any part of the module does."""
        self._handles = [part.register_forward_pre_hook(called, prepend=True) for part in self.module.modules()]

    def load(self, memory: torch.Tensor) -> None:
        """On the current stream: behind everything that still computes with what was there."""
        mine = memory[self._offset : self._offset + self.image.nbytes]
        mine.copy_(self._host.tensor, non_blocking=True)
        bind(self.module, self.image, mine)
        self._unwatch()
        self.loaded = True

    def evict(self) -> None:
        let_go(self.module, self.image, self._device)
        self.loaded = False

    def close(self) -> None:
        self._unwatch()
        self._host.close()

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

"""A model with blocks of every kind, and host sides that tell when a slot is used too early or too late."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polymux.memory.base import Arrival
from polymux.memory.private_blocks import PrivateBlocks

WIDTH = 12


class Block(torch.nn.Module):
    """A block of some size, with a buffer, a tensor without axes, an empty one, and one under two names."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.down = torch.nn.Linear(hidden, WIDTH)
        self.again = self.up
        self.conv = torch.nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.nothing = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.again(x))) * self.scale + self.shift
        return x + torch.tanh(y) + self.conv(x[:, None, None])[:, :1].mean((1, 2))


class Toy(torch.nn.Module):
    """Two containers of blocks; the first block of each is tied to a tensor outside."""

    _no_split_modules = ("Block",)

    def __init__(self, first: int, second: int = 0) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(WIDTH, WIDTH)
        self.first = torch.nn.ModuleList(Block(8 + 5 * i) for i in range(first))
        self.second = torch.nn.ModuleList(Block(40 - 3 * i) for i in range(second))
        self.leave = torch.nn.Linear(WIDTH, WIDTH)
        self.first[0].shared = self.leave.weight
        self.order = [*self.first, *self.second]
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.order:
            x = block(x)
        return self.leave(x)


def toy(first: int, second: int = 0, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy(first, second).eval()


class LateBlocks(PrivateBlocks):
    """Ruins a slot as soon as it is fetched into, and brings the bytes only when they are waited for."""

    def fetch(self, index: int, slot: torch.Tensor, free: torch.cuda.Event | None) -> Arrival:
        self.fetches.append(index)
        slot.fill_(0xFF)
        return _Late(self.image(index), slot, index, self.arrived)

    def expect(self, order: Sequence[int]) -> None:
        self.fetches: list[int] = []
        self.arrived: list[int] = []


class _Late:
    def __init__(self, source: torch.Tensor, slot: torch.Tensor, index: int, arrived: list[int]) -> None:
        self.source, self.slot, self.index, self.arrived = source, slot, index, arrived

    def wait(self) -> None:
        self.slot[: self.source.numel()].copy_(self.source)
        self.arrived.append(self.index)

"""A network on several ranks, step by step: rank 0 plans and chooses, the others compute the same and hear what came.

Each rank has a part of the network's heads, and so a cache of its own in which the same blocks are the same sequences'.
Told is a step once, by whatever line there is to the other ranks; tokens go from device to device, so that nobody waits
for the host, and no rank can come to other ones. Knows neither processes nor how the network is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from polymux.ar.crossing import to_device
from polymux.ar.features import Ints
from polymux.ar.network import Network
from polymux.ar.orders import Begun, Prepare, Step
from polymux.ar.paged_cache import PagedCache
from polymux.ar.prompt_batch import lay_out
from polymux.ar.scheduler import Piece, Plan
from polymux.ar.sequence import Sequence
from polymux.ar.step_graphs import Graphs, StepGraphs
from polymux.errors import OutOfMemoryError

T = TypeVar("T")


class Accord:
    """Of ranks about what each does by itself. With None there is one rank, and nobody to ask."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        if self._group is None:
            return number
        told = torch.tensor([number])
        dist.all_reduce(told, dist.ReduceOp.MIN, self._group)
        return int(told)

    def all(self, work: Callable[[], T]) -> T:
        """Work that all ranks do, or none: raises what it raised here, OutOfMemoryError where it did not."""
        try:
            made = work()
        except Exception:
            self.least(0)
            raise
        if not self.least(1):
            raise OutOfMemoryError("another rank could not do its part")
        return made


class Lead:
    """Of rank 0: its runner says through this what it does. `tell`: all other ranks, in the order of the calls."""

    def __init__(self, group: dist.ProcessGroup, tell: Callable[[msgspec.Struct], None]) -> None:
        self._group, self._tell = group, tell

    def prepare(self) -> None:
        self._tell(Prepare())

    def begin(self, plan: Plan, cache: PagedCache) -> None:
        self._tell(step_of(plan, cache))

    def share(self, tokens: torch.Tensor) -> None:
        """These are the next ones."""
        dist.broadcast(tokens, group=self._group, group_src=0)


class FollowingRunner:
    """Of another rank: its part of every step."""

    def __init__(self, network: Network, cache: PagedCache, graphs: Graphs, group: dist.ProcessGroup) -> None:
        self._network, self._cache, self._group = network, cache, group
        self._last = torch.zeros(cache.rows + 1, dtype=torch.long, device=cache.device)
        self._steps = StepGraphs(network, cache, self._last, graphs, needed=True)

    def prepare(self) -> None:
        self._steps.prepare()

    def run(self, step: Step) -> None:
        if step.rows:
            self._steps.run(step.positions, step.rows, step.slots)
            self._hear(step.rows)
        if step.pieces and (rows := self._begin(step.pieces)):
            self._hear(rows)

    def _hear(self, rows: list[int]) -> None:
        """The next tokens of these."""
        tokens = torch.empty(len(rows), dtype=torch.long, device=self._cache.device)
        dist.broadcast(tokens, group=self._group, group_src=0)
        self._last[self._upload(np.array(rows, dtype=np.int64))] = tokens

    def _begin(self, pieces: list[Begun]) -> list[int]:
        """The rows of those whose next token comes of this."""
        batch = lay_out([_piece(piece) for piece in pieces], self._cache.block_size, self._upload)
        for piece in pieces:
            if piece.chooses:
                self._cache.table[piece.row, : len(piece.blocks)] = self._upload(np.array(piece.blocks)).int()
        self._cache.batch = batch.stretches
        self._network(batch.tokens, batch.positions, batch.keep, self._cache.handle)
        return [piece.row for piece in pieces if piece.chooses]

    def _upload(self, values: Ints) -> torch.Tensor:
        return to_device(values, self._cache.device)


def step_of(plan: Plan, cache: PagedCache) -> Step:
    going = plan.decodes
    return Step(
        rows=[s.row for s in going if s.row is not None],
        positions=[s.computed - 1 for s in going],
        slots=[cache.slot(s.blocks, s.computed - 1) for s in going],
        pieces=[
            Begun(p.sequence.row, p.start, p.sequence.tokens[: p.end], p.sequence.blocks, p.sequence.begun)
            for p in plan.pieces
            if p.sequence.row is not None
        ],
    )


def _piece(told: Begun) -> Piece:
    end = len(told.tokens)
    sequence = Sequence(name=told.row, tokens=told.tokens, limit=0, computed=end, blocks=told.blocks, row=told.row)
    sequence.begun = told.chooses
    return Piece(sequence, told.start, end)

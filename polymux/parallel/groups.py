"""The ranks among which one sequence is split, and what is told between them once for each form of call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from polymux.errors import ConfigError

MOST_KNOWN = 4096  # lengths that are remembered; all ranks forget them at the same moment, since all know the same


@dataclass(frozen=True)
class SequenceGroups:
    """whole: all of them. ulysses, ring: this rank's groups within it; None if that degree is 1.

    Rank r of `whole` is rank r % U of its ulysses group and rank r // U of its ring group, U the ulysses degree.
    """

    whole: dist.ProcessGroup
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        ulysses, ring = _size(self.ulysses), _size(self.ring)
        if ulysses * ring != self.whole.size():
            raise ConfigError(f"ulysses {ulysses} x ring {ring} is not the {self.whole.size()} ranks of the sequence")

    @property
    def ulysses_degree(self) -> int:
        return _size(self.ulysses)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


Lengths = tuple[int, ...]  # of a sequence's parts, by rank


@dataclass
class Turn:
    """One forward of the model: what is the same on all ranks about it, and what its splits have cut so far."""

    groups: SequenceGroups
    shapes: Hashable = ()
    calls: dict[int, int] = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)  # whole lengths, by argument
    even: bool = True  # whether all of them divide: then every part of anything is as long on all ranks
    known: dict[Hashable, tuple[Lengths, ...]] = field(default_factory=dict)

    def begin(self, shapes: Hashable) -> None:
        self.shapes = shapes
        self.calls.clear()
        self.split.clear()
        self.even = True
        if len(self.known) > MOST_KNOWN:
            self.known.clear()

    def part(self, whole: int) -> tuple[int, int]:
        """Where this rank's part of a sequence begins, and how long it is: the first ranks take what is left over."""
        rank, size = self.groups.whole.rank(), self.groups.whole.size()
        each, over = divmod(whole, size)
        if over:
            self.even = False
        return rank * each + min(rank, over), each + (rank < over)

    def lengths(self, place: int, mine: Lengths, device: torch.device) -> tuple[Lengths, ...]:
        """Of each of these parts, how long it is on every rank. The ranks tell each other when a place is reached for
        the first time with such a call, and from then on they know: no rank may ask where another one does not."""
        if self.even:
            return tuple((n,) * self.groups.whole.size() for n in mine)
        nth = self.calls.get(place, 0)
        self.calls[place] = nth + 1
        key = (self.shapes, place, nth)
        if key not in self.known:
            told = torch.empty(self.groups.whole.size() * len(mine), dtype=torch.int64, device=device)
            dist.all_gather_into_tensor(told, torch.tensor(mine, device=device), group=self.groups.whole)
            self.known[key] = tuple(map(tuple, told.view(-1, len(mine)).T.tolist()))
        return self.known[key]

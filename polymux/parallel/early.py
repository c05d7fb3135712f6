"""The values of a layer's attention, sent to the other ranks while its queries and keys are still being made.

Between a layer's projections and its attention are norms and rotations, of queries and keys alone. That the values are
what the projection gave, untouched, the first forward shows; where they are not, they are sent with the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymux.parallel.exchange import Coming, send_heads
from polymux.parallel.groups import Turn


class EarlyValues:
    """A forward hook of a layer's projection to values, and what it has sent."""

    def __init__(self, turn: Turn, owner: torch.nn.Module, name: str) -> None:
        self._turn, self._owner, self._name = turn, owner, name
        self._made: Tensor | None = None  # the projection's latest result, held so that nothing else takes its place
        self._heads: int | None = None  # known once the attention has had the projection's result as its values
        self._never = False
        self._coming: Coming | None = None

    def __call__(self, module: torch.nn.Module, args: object, output: Tensor) -> None:
        if self._made is not None and self._heads is None:
            self._never = True  # the attention did not ask: it has all keys on every rank
        self._made = self._coming = None
        group = self._turn.groups.ulysses
        # An adapter stands around the projection: the values are others then. All ranks see the same here.
        changed = getattr(self._owner, self._name) is not module
        if self._never or changed or group is None or output.ndim != 3:
            return
        self._made = output
        if self._heads is not None and self._turn.even and output.shape[2] % self._heads == 0:
            lengths = (output.shape[1],) * group.size()
            self._coming = send_heads(output.reshape(*output.shape[:2], self._heads, -1), lengths, group)

    def take(self, value: Tensor) -> Coming | None:
        """The values, if they are those that were sent."""
        made, coming = self._made, self._coming
        self._made = self._coming = None
        same = made is not None and (made.data_ptr(), made.numel()) == (value.data_ptr(), value.numel())
        if coming is None:
            if made is not None and not same:
                self._never = True
            elif same and self._heads is None:
                self._heads = value.shape[2]
            return None
        if same and value.shape[2] == self._heads:
            return coming
        coming.wait()  # all ranks have sent it; nobody uses it
        self._never = True
        return None

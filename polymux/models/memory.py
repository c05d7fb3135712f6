"""What causal layers keep of a sound that they are fed in parts: it is handed in again with the next part.

In parts of any size they make the same samples as at once: a layer's padding of zeros is what is kept at first. Knows
no layers.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


class Memory:
    """What the layers of one forward keep, in the order in which they run: one row of numbers for each row, so that few
    tensors travel. `kept` (rows, numbers): that of the part before; None: there was none."""

    def __init__(self, kept: Tensor | None) -> None:
        self._kept, self._read = kept, 0
        self._new: list[Tensor] = []

    def before(self, x: Tensor, count: int) -> Tensor:
        """`x` (rows, ..., n) with the `count` columns that came before it."""
        if not count:
            return x
        joined = torch.cat([self._next(x, (*x.shape[1:-1], count)), x], dim=-1)
        self._new.append(joined[..., joined.shape[-1] - count :].flatten(1))
        return joined

    def new(self) -> Tensor:
        """What is to be kept of this part."""
        return torch.cat(self._new, dim=1)

    def _next(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._kept is None:
            return x.new_zeros(len(x), *shape)
        begin, self._read = self._read, self._read + math.prod(shape)
        return self._kept[:, begin : self._read].reshape(len(x), *shape)

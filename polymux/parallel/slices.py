"""Which part of each tensor a rank has under tensor parallelism; read from a file without the rest of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polymux.families.sharding import TensorPlan


@dataclass(frozen=True)
class Slice:
    """This rank's part of one parameter. `spans` along `dim`, one for each part packed into it; `zero`: another rank
    holds it, and it is zero here."""

    dim: int
    spans: tuple[tuple[int, int], ...]
    zero: bool = False

    def of(self, whole: Any) -> torch.Tensor:
        """Of a tensor, or of what safetensors' `get_slice` gives, of which no more is read than this."""
        raise NotImplementedError


def slices(module: torch.nn.Module, plan: TensorPlan, rank: int, size: int) -> dict[str, Slice]:
    """By names of parameters; the others are whole on every rank. The module is whole, and may be on meta."""
    raise NotImplementedError

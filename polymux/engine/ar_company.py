"""What the engine of language models on rank 0 has of the other ranks. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from polymux.ar.ranks import Lead


@dataclass(frozen=True)
class Company:
    """`group`: all ranks; `lead`: tells the others each step."""

    group: dist.ProcessGroup
    lead: Lead

    @classmethod
    def of(cls, group: dist.ProcessGroup, tell: Callable[[msgspec.Struct], None]) -> Company:
        return cls(group, Lead(group, tell))

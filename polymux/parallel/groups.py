"""The ranks among which one sequence is split."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class SequenceGroups:
    """whole: all of them. ulysses, ring: this rank's groups within it; None if that degree is 1.

    Rank r of `whole` is rank r % U of its ulysses group and rank r // U of its ring group, U the ulysses degree.
    """

    whole: dist.ProcessGroup
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None

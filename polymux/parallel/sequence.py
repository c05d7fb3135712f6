"""Sequence parallelism: each rank has a part of the tokens, and attention brings them together."""

from __future__ import annotations

import torch

from polymux.families.sharding import SequencePlan
from polymux.parallel.groups import SequenceGroups


class SequenceSharding:
    """What was put on the module, until `undo`."""

    def undo(self) -> None:
        raise NotImplementedError


def shard_sequence(module: torch.nn.Module, plan: SequencePlan, groups: SequenceGroups) -> SequenceSharding:
    """Have the module compute on this rank's part of its sequence. Raises ConfigError if its attention cannot."""
    raise NotImplementedError

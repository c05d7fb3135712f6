"""Which plan a model has: the one that its family declares, or else diffusers' own, read into the same form."""

from __future__ import annotations

import torch

from polymux.families.sharding import SequencePlan, TensorPlan


def sequence_plan(module: torch.nn.Module) -> SequencePlan:
    """Raises ConfigError if nobody says how the model's sequence is split."""
    raise NotImplementedError


def tensor_plan(module: torch.nn.Module) -> TensorPlan:
    """Raises ConfigError if nobody says how the model's layers are divided."""
    raise NotImplementedError

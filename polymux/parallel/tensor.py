"""Tensor parallelism: each rank has a part of every declared layer, and of the heads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from polymux.families.sharding import TensorPlan


def check_tensor(module: torch.nn.Module, plan: TensorPlan, size: int) -> None:
    """Raise ConfigError, with the numbers, if a head count or a width does not divide. Meta tensors will do."""
    raise NotImplementedError


def shard_tensor(module: torch.nn.Module, plan: TensorPlan, group: dist.ProcessGroup, *, sliced: bool = False) -> None:
    """Keep this rank's part of the declared layers, for good. `sliced`: its parameters are this rank's part already,
    as `slices` of the same plan gave them."""
    raise NotImplementedError

"""Fully sharded weights: each rank of a shard group holds a part of every block, and gathers it to compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh


def shard_weights(module: torch.nn.Module, mesh: DeviceMesh, blocks: Sequence[str] = ()) -> None:
    """Shard the blocks and the rest over the mesh, for good: one dimension (shard), or two (replicate, shard).

    `blocks`: containers, as a family declares them. The module must be whole and equal on all ranks.
    """
    raise NotImplementedError

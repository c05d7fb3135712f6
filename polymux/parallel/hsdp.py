"""Sharded weights: each rank of a shard group holds a part of every block, and gathers a block to compute it.

torch's FSDP does it. Ranks may get different arguments, or the same; they must run the same blocks in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from polymux.errors import ConfigError
from polymux.memory.containers import block_paths


def shard_weights(module: torch.nn.Module, mesh: DeviceMesh, blocks: Sequence[str] = ()) -> None:
    """Shard the blocks over the mesh, for good: over one dimension (shard), or two with names
    (replicate, shard).

    `blocks`: their containers, as a family declares them. The module must be whole, and equal on all ranks; a block
    goes to its device when it is sharded. What is in no block stays whole on every rank. The module's class, and those
    of its blocks, become FSDP's, which inherit from them. Raises ConfigError if nothing tells what its blocks are.
    """
    paths = block_paths(module, blocks)
    if not paths:
        raise ConfigError(f"nothing tells what the blocks of {type(module).__name__} are", param="use_hsdp")
    sharded = {p for path in paths for p in module.get_submodule(path).parameters()}
    rest = {p for p in module.parameters() if p not in sharded}
    for path in paths:
        fully_shard(module.get_submodule(path), mesh=mesh)
    fully_shard(module, mesh=mesh, ignored_params=rest)  # the blocks share its streams: one is gathered ahead
    plain = module.forward
    register_fsdp_forward_method(module, "forward")  # which an engine calls by itself, past the module's hooks
    gathering = module.forward
    module.__dict__["forward"] = functools.wraps(plain)(lambda *args, **kwargs: gathering(*args, **kwargs))

"""The ranks of one stage replica as a grid with named axes, and this rank's place in it.

From the outermost axis to the innermost: dp (replicas of the work), cfg (guidance), ring and ulysses (together sp: the
parts of a sequence), tp (the parts of layers). Neighbours in the innermost axes are neighbours in rank. Knows neither
who starts ranks nor what they compute.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # it is documented there
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polymux.errors import ConfigError
from polymux.parallel.groups import SequenceGroups
from polymux.parallel_config import DiffusionParallelConfig

AXES = ("dp", "cfg", "ring", "ulysses", "tp")
# No time limit of their own: a rank may wait for as long as another one computes. What is lost is noticed at the lines
# between the processes.
FOREVER = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Mesh:
    """`grid` is None on the one rank of a world of one."""

    rank: int = 0
    size: int = 1
    grid: DeviceMesh | None = None
    degrees: dict[str, int] = field(default_factory=dict)
    sequence: SequenceGroups | None = None
    inner_grid: DeviceMesh | None = None  # the ranks with the same guidance calls as this one
    shards: DeviceMesh | None = None  # of sharded weights: (replicate, shard), or (shard)

    @classmethod
    def join(cls, config: DiffusionParallelConfig, rank: int, store: Store, device: torch.device) -> Mesh:
        """Meet the other ranks. A collective, for all of them."""
        size = config.world_size
        # Not bound to the device: torch would then make groups without gloo, and what ranks tell each other beside
        # tensors would wait for the device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
        degrees = degrees_of(config)
        grid = init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=AXES)
        shards = _shards(config, device) if config.use_hsdp else None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # those may have chosen the one whose number is the rank
        sequence = None
        if degrees["ring"] * degrees["ulysses"] > 1:
            whole = grid["ring", "ulysses"]._flatten("sp").get_group()
            single = {axis: grid.get_group(axis) if degrees[axis] > 1 else None for axis in ("ring", "ulysses")}
            sequence = SequenceGroups(whole, **single)
        inner = grid["ring", "ulysses", "tp"]._flatten("inner")
        return cls(rank, size, grid, degrees, sequence, inner, shards=shards)

    @property
    def inner(self) -> dist.ProcessGroup:
        """The ranks with the same guidance calls as this one."""
        assert self.inner_grid is not None
        return self.inner_grid.get_group()

    @property
    def world(self) -> dist.ProcessGroup:
        """All of them. Only where there are several."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def degree(self, axis: str) -> int:
        return self.degrees.get(axis, 1)

    def rank_in(self, axis: str) -> int:
        """This rank's place along an axis."""
        return 0 if self.grid is None else self.grid.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along this axis alone. Only where there are several ranks."""
        assert self.grid is not None
        return self.grid.get_group(axis)


ALONE = Mesh()


def degrees_of(config: DiffusionParallelConfig) -> dict[str, int]:
    """The length of each axis."""
    return dict.fromkeys(AXES, 1) | {
        "cfg": config.cfg_parallel_size,
        "ring": config.ring_degree,
        "ulysses": config.ulysses_degree,
        "tp": config.tensor_parallel_size,
    }


def _shards(config: DiffusionParallelConfig, device: torch.device) -> DeviceMesh:
    if config.hsdp_replicate_size == 1:
        return init_device_mesh(device.type, (config.hsdp_shards,), mesh_dim_names=("shard",))
    sizes = (config.hsdp_replicate_size, config.hsdp_shards)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def rank_device(config: DiffusionParallelConfig, rank: int, asked: str) -> str:
    """Which device this rank has, as `--device` would name it. Raises ConfigError if there are not enough."""
    if asked.partition(":")[0] == "auto":
        asked = asked.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return asked
    name, _, first = asked.partition(":")
    if name != "cuda" or not (first or "0").isdecimal():  # refused with the reason when it is resolved
        return asked
    begin, count = int(first or 0), torch.cuda.device_count()
    if begin + config.world_size > count:
        last = f"cuda:{begin} to cuda:{begin + config.world_size - 1}"
        raise ConfigError(f"{config.describe()} need {last}, and there are {count} CUDA devices", param="device")
    return f"cuda:{begin + rank}"

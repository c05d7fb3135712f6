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
from polymux.parallel_config import DiffusionParallelConfig

AXES = ("dp", "cfg", "ring", "ulysses", "tp")


@dataclass(frozen=True)
class Mesh:
    """`grid` is None on the one rank of a world of one."""

    rank: int = 0
    size: int = 1
    grid: DeviceMesh | None = None
    degrees: dict[str, int] = field(default_factory=dict)

    @classmethod
    def join(cls, config: DiffusionParallelConfig, rank: int, store: Store, device: torch.device) -> Mesh:
        """Meet the other ranks. A collective, for all of them."""
        size = config.world_size
        # No time limit of its own: a rank may wait for as long as another one computes. What is lost is noticed at the
        # lines between the processes.
        forever = datetime.timedelta(days=365)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=forever)
        degrees = degrees_of(config)
        grid = init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=AXES)
        return cls(rank, size, grid, degrees)

    def degree(self, axis: str) -> int:
        return self.degrees.get(axis, 1)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along this axis alone. Only where there are several."""
        assert self.grid is not None
        return self.grid.get_group(axis)


ALONE = Mesh()


def degrees_of(config: DiffusionParallelConfig) -> dict[str, int]:
    """The length of each axis."""
    lengths = dict.fromkeys(AXES, 1)
    lengths["cfg"] = config.cfg_parallel_size
    return lengths


def rank_device(config: DiffusionParallelConfig, rank: int, asked: str) -> str:
    """Which device this rank has, as `--device` would name it. Raises ConfigError if there are not enough."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
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

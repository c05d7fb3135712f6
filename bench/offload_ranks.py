"""Two ranks with a GPU each (or two processes on a CPU): complete blocks on each, against gathered ones."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from denoisers import Denoiser, denoisers
from report import Clock, Table, host_memory, save

from polymux.memory.base import HostBlocks
from polymux.memory.block_stream import BlockStream, GatheredStream
from polymux.memory.containers import block_paths
from polymux.memory.gather_blocks import GatherBlocks
from polymux.memory.layout import layout_of
from polymux.memory.private_blocks import PrivateBlocks
from polymux.memory.slots import Slots

WORLD = 2
SLOTS = 3
STEPS = 5
COLUMNS = ("strategy", "seconds", "floors", "one-GPU floors", "GB/s", "device GiB", "host PSS GiB", "equal", "set-up s")


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (arguments, str(Path(folder, "store"))), nprocs=WORLD)


class Rank:
    """What one rank does; rank 0 speaks."""

    def __init__(self, rank: int, device: torch.device, denoiser: Denoiser) -> None:
        self.rank, self.device, self.denoiser, self.clock = rank, device, denoiser, Clock(device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.inputs = denoiser.inputs(denoiser, device, self.dtype)
        self.resident = self.bus = 0.0
        self.table = (
            Table(f"{denoiser.name}, {denoiser.size}, one step on each of two ranks", COLUMNS) if rank == 0 else None
        )

    def run(self) -> None:
        model = self.denoiser.build(self.device, self.dtype)
        self.wanted = self.denoiser.step(model, self.inputs)
        self.resident = self.measured("resident", model, 0, None)
        layout = layout_of(model, block_paths(model))
        made: list[HostBlocks] = []
        set_up = self.clock.seconds(lambda: made.append(PrivateBlocks(model, layout, self.device)))
        model.to(self.device)
        self.bus = self.one_gpu_bus(made[0])
        self.stream("complete blocks on each", model, made[0], BlockStream, set_up)
        del model
        model = self.denoiser.build(self.device, self.dtype)
        assert dist.group.WORLD is not None
        group = dist.group.WORLD
        set_up = self.clock.seconds(lambda: made.append(GatherBlocks(model, layout, self.device, group)))
        model.to(self.device)
        self.stream("half of each block on each, all-gathered", model, made[1], GatheredStream, set_up)

    def one_gpu_bus(self, source: HostBlocks) -> float:
        """The blocks' time over one bus, while the other rank waits."""
        slots = [torch.empty(source.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        blocks = range(len(source.layout.blocks))

        def once() -> None:
            arrivals = [source.fetch(i, slots[i % 2], None) for i in blocks]
            arrivals[-1].wait()

        took = 0.0
        for rank in range(WORLD):
            dist.barrier()
            if rank == self.rank:
                took = self.clock.seconds(once, 2)
        dist.barrier()
        return took

    def stream(
        self, name: str, model: torch.nn.Module, source: HostBlocks, kind: type[BlockStream], set_up: float
    ) -> None:
        ring = Slots(SLOTS, source.slot_bytes, self.device)
        ring.allocate()
        stream = kind(model, source, ring)
        model.register_forward_pre_hook(lambda *_: stream.begin())
        model.register_forward_hook(lambda *_: stream.end())
        self.measured(name, model, sum(image.nbytes for image in source.layout.blocks), set_up)
        if isinstance(stream, GatheredStream):
            self.one_idles(name, model, stream)
        self.clock.sync()
        dist.barrier()
        stream.close()

    def one_idles(self, name: str, model: torch.nn.Module, stream: GatheredStream) -> None:
        def step() -> object:
            return self.denoiser.step(model, self.inputs) if self.rank == 0 else stream.idle_pass()

        dist.barrier()
        took = self.clock.seconds(step, STEPS)
        self.add(strategy=f"{name}, one rank idle", seconds=took)

    def measured(self, name: str, model: torch.nn.Module, nbytes: int, set_up: float | None) -> float:
        self.clock.reset_peak()
        equal = torch.equal(self.denoiser.step(model, self.inputs), self.wanted)
        self.clock.sync()
        dist.barrier()
        took = self.clock.seconds(lambda: self.denoiser.step(model, self.inputs), STEPS)
        floor = max(self.resident, self.bus if nbytes else 0) or took
        both = torch.tensor([host_memory("Pss")["Pss"], float(equal)], dtype=torch.float64, device=self.device)
        dist.all_reduce(both)
        self.add(
            strategy=name, seconds=took, floors=took / floor, device_GiB=self.clock.peak, host_PSS_GiB=float(both[0]),
            equal=bool(both[1] == WORLD),
            **{
                "GB/s": nbytes / took / 1e9 or None, "set-up_s": set_up,
                "one-GPU_floors": took / self.bus if self.bus else None,
            },
        )  # fmt: skip
        return took

    def add(self, **row: object) -> None:
        if self.table is not None:
            self.table.add(**row)


@torch.no_grad()
def _rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        device_id=device if cuda else None,
    )  # fmt: skip
    tables = []
    for denoiser in denoisers(arguments.tiny, arguments.layers):
        if denoiser.name in (arguments.models or ["qwen-image"]):
            one = Rank(rank, device, denoiser)
            one.run()
            tables.append(one.table)
    if rank == 0:
        save("offload_ranks.json", [table for table in tables if table is not None])
    dist.barrier()
    os._exit(0)  # taking NCCL apart may take long, and nothing is left to do

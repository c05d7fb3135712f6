"""One forward of a denoiser on several GPUs, divided by diffusers' own means, against one GPU.

    python bench/parallel_bare.py [--ranks 2] [--tiny]

The denoisers of `denoisers.py`, eager, with random weights: ring and Ulysses for the video's, Ulysses and tensor
parallelism for the picture's. One way that fails is reported and left out; on a CPU, where diffusers divides nothing,
all do. Started by `parallel.py`, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from denoisers import Denoiser, denoisers
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import TensorParallelConfig
from report import Clock, Table, save

RUNS = 3
WAYS = {"wan-14b": ("ulysses", "ring"), "qwen-image": ("ulysses", "tensor")}


def divide(model: torch.nn.Module, way: str, ranks: int) -> None:
    if way == "tensor":
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=ranks))  # type: ignore[operator]
    else:
        model.enable_parallelism(config=ContextParallelConfig(**{f"{way}_degree": ranks}))  # type: ignore[operator]


@torch.no_grad()
def compare(denoiser: Denoiser, device: torch.device, ranks: int) -> list[dict[str, object]]:
    """Rows of the table. All ranks compute the same on one GPU first."""
    clock = Clock(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = denoiser.inputs(denoiser, device, dtype)
    rows: list[dict[str, object]] = []
    alone: float | None = None
    for way in ("one", *WAYS[denoiser.name]):
        model = denoiser.build(device, dtype)
        try:
            if way != "one":
                divide(model, way, ranks)
            denoiser.step(model, inputs)
            took = clock.seconds(lambda model=model: denoiser.step(model, inputs), RUNS)  # type: ignore[misc]
        except Exception as error:  # all ranks fail alike: the next way is of use all the same
            if device.type == "cuda":
                traceback.print_exc()
            else:
                print(f"{way}: {error!r}", flush=True)
            rows.append({"mode": f"{denoiser.name}, {way}: failed"})
            continue
        finally:
            del model
            clock.reset_peak()
        alone = took if way == "one" else alone
        rows.append({"mode": f"{denoiser.name}, {way}", "forward": took, "vs": alone / took if alone else None})
        dist.barrier()
    return rows


def rank_main(rank: int, arguments: argparse.Namespace, store: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks,
        device_id=device if cuda else None,
    )  # fmt: skip
    table = None
    if rank == 0:
        table = Table(f"diffusers' own, one forward, {arguments.ranks} ranks", ("mode", "forward", "vs"))
    for denoiser in denoisers(arguments.tiny, arguments.layers):
        for row in compare(denoiser, device, arguments.ranks):
            if table is not None:
                table.add(**row)
    if table is not None:
        save("parallel_bare.json", [table], ranks=arguments.ranks)
    dist.barrier()
    os._exit(0)  # taking NCCL apart may take long, and nothing is left to do


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, help="in place of the model's own number")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (arguments, str(Path(folder, "store"))), nprocs=arguments.ranks)
    print(f"in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()

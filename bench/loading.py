"""How fast a cold checkpoint loads: reading ahead with several threads against the plain path, in one run.

Makes a synthetic checkpoint of a few GiB, drops its files from the page cache before every load, and takes both paths
in turns. The clock stops when every page of the weights has been read: on a CPU the plain path maps the files within
milliseconds and reads them later, at the first use.

    python bench/loading.py [--gib 4] [--threads 4] [--rounds 3] [--device cpu] [--dtype bf16] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import diffusers
import torch

from polymux.config import ModelConfig
from polymux.engine.device import resolve_device
from polymux.loading import auto_dtype, load_pipeline
from polymux.testing.tiny import Ctx, make

BLOCK = dict(attention_head_dim=128, num_attention_heads=24, axes_dims_rope=[16, 56, 56], joint_attention_dim=32)


def make_checkpoint(folder: Path, gib: float, dtype: torch.dtype) -> Path:
    """A tiny checkpoint whose transformer is replaced by one of about `gib` GiB in shards of 1 GB."""
    checkpoint = make("flux-dev", folder, Ctx())
    config = json.loads((checkpoint / "transformer" / "config.json").read_text()) | BLOCK
    size = dict[int, int]()
    for layers in (1, 2):
        with torch.device("meta"):
            model = diffusers.FluxTransformer2DModel.from_config(
                config | {"num_layers": 1, "num_single_layers": layers}
            )
        size[layers] = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    layers = max(1, round((gib * 2**30 - size[1]) / (size[2] - size[1])) + 1)
    model = diffusers.FluxTransformer2DModel.from_config(config | {"num_layers": 1, "num_single_layers": layers})
    shutil.rmtree(checkpoint / "transformer")
    model.to(dtype).save_pretrained(str(checkpoint / "transformer"), max_shard_size="1GB")
    return checkpoint


def drop_from_cache(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def kernel_read_ahead(folder: Path) -> str:
    """How far the kernel itself reads ahead on the folder's disk: what the plain path lives on."""
    number = folder.stat().st_dev
    file = Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb")
    return f"{file.read_text().strip()} kB" if file.exists() else "unknown"


def load(checkpoint: Path, device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Seconds until all weights have been read; 0 threads is the plain path."""
    config = ModelConfig(
        model=str(checkpoint),
        enable_multithread_weight_load=threads > 0,
        num_weight_load_threads=max(threads, 1),
    )
    start = time.perf_counter()
    pipe = load_pipeline(config, device, dtype)
    for parameter in pipe.transformer.parameters():
        parameter.flatten()[:: 4096 // parameter.element_size()].float().sum().item()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the weights")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help="loaded as")
    parser.add_argument("--file-dtype", choices=("bf16", "fp32"), default="fp32", help="dtype of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint; decides which disk is measured")
    args = parser.parse_args()

    device = resolve_device(args.device)
    dtype = auto_dtype(args.dtype, device)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoint = make_checkpoint(Path(folder), args.gib, auto_dtype(args.file_dtype, device))
        files = sorted(checkpoint.rglob("*.safetensors"))
        gib = sum(file.stat().st_size for file in files) / 2**30
        load(checkpoint, device, dtype, 0)  # imports, allocations
        seconds: dict[int, list[float]] = {0: [], args.threads: []}
        for _ in range(args.rounds):
            for threads, times in seconds.items():
                drop_from_cache(files)
                times.append(load(checkpoint, device, dtype, threads))
        warm = load(checkpoint, device, dtype, 0)
        own = kernel_read_ahead(checkpoint)
    plain, ahead = (statistics.median(times) for times in seconds.values())
    print(
        f"{gib:.1f} GiB of {args.file_dtype} in {len(files)} files to {dtype} on {device}, kernel read-ahead {own}, "
        f"median of {args.rounds}: "
        f"plain {plain:.2f} s ({gib / plain:.2f} GiB/s), {args.threads} threads {ahead:.2f} s "
        f"({gib / ahead:.2f} GiB/s): {plain / ahead:.2f} times as fast; warm, plain {warm:.2f} s"
    )


if __name__ == "__main__":
    main()

"""Kernels of attention over a video: ordinary ones, and the block-sparse one, at lengths of 4k, 32k and 75k tokens.

    python bench/attention.py [--tokens 4096 32768 75600] [--heads 40] [--channels 128] [--sparsity 0.5 0.8]

One layer of self-attention with the heads of Wan's 14 B, in bf16 on a GPU; on a CPU in fp32, for a try: --tokens 1024
--heads 2. "ratio" is the time of torch's own choice over that of the kernel, in this run; the kernels take turns, and
the median of the rounds counts. The block-sparse one's time is with the choosing of its blocks, and "of keys" says how
many an ordinary block of queries looks at. "error" is the largest difference from attention with the same mask, at
lengths where that fits. Backends that do not run here are named with what they lack.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from report import Clock, Table, save

from polymux.diffusion.attention import KERNELS, find_kernel
from polymux.diffusion.block_sparse import BLOCK, Tokens, attend, choose, kept, problem
from polymux.errors import ConfigError

DENSE = ("TORCH_SDPA", "TORCH_SDPA_FLASH", "CUDNN_ATTN", "FLASH_ATTN", "SAGE_ATTN", "TORCH_SDPA_EFFICIENT")
FRAMES = 21
LARGEST_MASK = 8192  # tokens: a mask for each head
Run = Callable[[], torch.Tensor]


def sparse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: Tokens, sparsity: float) -> Run:
    heads_first = [one.transpose(1, 2).contiguous() for one in (query, key, value)]

    def run() -> torch.Tensor:
        return attend(*heads_first, choose(*heads_first[:2], tokens, sparsity)).transpose(1, 2)

    return run


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: Tokens, sparsity: float
) -> torch.Tensor:
    """The same with torch's own attention and a mask of all tokens."""
    heads_first = [one.transpose(1, 2).contiguous() for one in (query, key, value)]
    table = choose(*heads_first[:2], tokens, sparsity).table
    mask = table.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, : tokens.length, : tokens.length]
    return F.scaled_dot_product_attention(*heads_first, mask).transpose(1, 2)


def measure(length: int, args: Any, kernels: dict[str, str], device: torch.device, table: Table) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, length, args.heads, args.channels)
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
    frame = max(length // FRAMES, 1)
    tokens = Tokens(video=length, frame=frame)
    runs: dict[str, Run] = {
        name: lambda kernel=kernel: dispatch_attention_fn(query, key, value, backend=kernel)  # type: ignore[misc]
        for name, kernel in kernels.items()
    }
    facts: dict[str, dict[str, Any]] = {}
    if problem(device, dtype) is None:
        for sparsity in args.sparsity:
            name = f"block-sparse {sparsity:g}"
            runs[name] = sparse(query, key, value, tokens, sparsity)
            facts[name] = {"of_keys": kept(tokens, sparsity) / math.ceil(length / BLOCK)}
            if length <= LARGEST_MASK:
                error = runs[name]().float() - masked(query, key, value, tokens, sparsity).float()
                facts[name]["error"] = float(error.abs().max())
    clock, times = Clock(device), {name: list[float]() for name in runs}
    for run in runs.values():
        run()
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(clock.seconds(run, args.runs))
    reference = statistics.median(times["TORCH_SDPA"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        table.add(tokens=length, kernel=name, ms=median * 1000, ratio=reference / median, **facts.get(name, {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 32768, 75600])
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.5, 0.8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=2, help="in each round, one behind the other")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels: dict[str, str] = {}
    for name in DENSE:
        try:
            kernels[name] = find_kernel(name, device, dtype)
        except ConfigError as error:
            print(error)
    print(problem(device, dtype) or f"the block-sparse kernel runs; {len(KERNELS)} backends are known")
    table = Table("Attention", ("tokens", "kernel", "ms", "ratio", "of keys", "error"))
    with torch.no_grad():
        for length in args.tokens:
            measure(length, args, kernels, device, table)
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    print(f"\ncompiled graphs: {graphs}")
    save("attention.json", [table], heads=args.heads, channels=args.channels, graphs=graphs)


if __name__ == "__main__":
    main()

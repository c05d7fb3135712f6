"""What an adapter of rank 64 beside the layers costs a step: requests with and without it, in one engine.

    python bench/lora.py [--rank 64] [--steps 10] [--size 1024] [--rounds 2]    one GPU: Qwen-Image's denoiser
    python bench/lora.py --tiny                                                 small, also on a CPU

"none": before any adapter was read; "beside": requests without one, once it has been; "with": requests that name it;
"fused": the adapter added to the weights at the start (`--lora-backend distill`), in an engine of its own. Eager, with
random weights. What is no step is taken out: it is the difference of requests of 2 steps and of more. "ratio" is the
time of "none" over that of the row; the best of the rounds counts. Encoder and autoencoder stay tiny.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from real_size import MODELS, make_changed
from report import Clock, Table, save
from safetensors.torch import save_file

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.request import Failed, LoRARequest, OmniDiffusionSamplingParams, Request

FEW = 2  # steps of the request that is taken off
LAYERS = ("to_q", "to_k", "to_v", "to_out.0")


def model_of(folder: Path, tiny: bool) -> Path:
    checkpoint, configs = MODELS["qwen-image"]
    denoiser = {k: v for k, v in configs["transformer"].items() if k != "joint_attention_dim"}
    return make_changed(checkpoint, {} if tiny else {"transformer": denoiser}, folder)


def adapter_of(engine: DiffusionEngine, rank: int, file: Path) -> Path:
    """For the attention of all blocks, as PEFT names its layers."""
    tensors: dict[str, torch.Tensor] = {}
    made = torch.Generator().manual_seed(0)
    for name, layer in engine.pipeline.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(LAYERS):
            for part, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
                value = torch.randn(shape, generator=made) * 0.01
                tensors[f"transformer.{name}.lora_{part}.weight"] = value.to(torch.bfloat16)
    save_file(tensors, file)
    return file


def seconds(engine: DiffusionEngine, clock: Clock, steps: int, args: argparse.Namespace, lora: Path | None) -> float:
    adapters = () if lora is None else (LoRARequest(path=str(lora)),)
    params = OmniDiffusionSamplingParams(
        width=args.size, height=args.size, num_inference_steps=steps, seed=1, output_type="latent", lora=adapters
    )
    clock.sync()
    start = time.perf_counter()
    engine.add(Request(request_id="a", prompt="a lighthouse in a storm", params=params))
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.error.message)
        engine.taken("a")
    clock.sync()
    return time.perf_counter() - start


def step(engine: DiffusionEngine, args: argparse.Namespace, lora: Path | None = None) -> float:
    clock = Clock(engine.device)
    seconds(engine, clock, FEW, args, lora)  # warms up
    few, many = (
        min(seconds(engine, clock, n, args, lora) for _ in range(args.rounds)) for n in (FEW, FEW + args.steps)
    )
    return (many - few) / args.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.size = 64
    with tempfile.TemporaryDirectory() as folder:
        flat: dict[str, Any] = {"model": str(model_of(Path(folder), args.tiny)), "load_format": "dummy"}
        flat |= {"warmup": False, "enforce_eager": True}
        engine = DiffusionEngine.load(EngineConfig.from_flat(**flat))
        file = adapter_of(engine, args.rank, Path(folder, "adapter.safetensors"))
        table = Table(f"Adapter of rank {args.rank}", ("requests", "step", "ratio"))
        none = step(engine, args)
        table.add(requests="none", step=none, ratio=1.0)
        for name, lora in (("with", file), ("beside", None)):
            took = step(engine, args, lora)
            table.add(requests=name, step=took, ratio=none / took)
        engine.close()
        fused = DiffusionEngine.load(EngineConfig.from_flat(**flat, lora_backend="distill", lora_path=(str(file),)))
        took = step(fused, args)
        table.add(requests="fused", step=took, ratio=none / took)
        fused.close()
        save("lora.json", [table], rank=args.rank, size=args.size)


if __name__ == "__main__":
    main()

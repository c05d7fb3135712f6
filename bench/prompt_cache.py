"""Requests whose prompts are known against requests whose prompts are not, and against an engine that keeps none.

    python bench/prompt_cache.py [--requests 3] [--rounds 3] [--tokens 64]

The text encoder has six layers of the size of Qwen3-0.6B's 28 and a small vocabulary (random weights); the denoiser
and the decoder are tiny and make one step, so nearly all of a request is its encoding: the ratio is of that, and a
real request gains the share that encoding has in it. "off" is an engine with --prompt-cache-gib 0, "new" one with the
cache that is asked for new prompts, "known" the same one asked for them again. They take turns, and the ratios are of
the best round of each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from real_size import make_changed
from report import Table, save

from polymux.config import EngineConfig
from polymux.engine.device import resolve_device
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import auto_dtype, load_pipeline
from polymux.request import Failed, OmniDiffusionSamplingParams, Request

ENCODER: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "layer_types": ["full_attention"] * 6,
}  # fmt: skip


def seconds(engine: DiffusionEngine, prompts: list[str]) -> float:
    """Per request, one after the other."""
    start = time.perf_counter()
    for prompt in prompts:
        params = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=1, guidance_scale=0.0, seed=0)
        engine.add(Request(request_id="a", prompt=prompt, params=params))
        while engine.busy:
            for event in engine.step():
                if isinstance(event, Failed):
                    raise RuntimeError(event.error.message)
    return (time.perf_counter() - start) / len(prompts)


def prompts_of(count: int, tokens: int, salt: int) -> list[str]:
    """Each starts with words of its own."""
    return [" ".join([f"{salt} {i}", *["fox"] * tokens]) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="words of a prompt, roughly")
    args = parser.parse_args()
    device = resolve_device("auto")
    changes = {"text_encoder": ENCODER, "transformer": {"cap_feat_dim": 1024}}
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig.from_flat(model=str(make_changed("z-image", changes, Path(folder))), load_format="dummy")
        pipeline: Any = load_pipeline(config.model, device, auto_dtype("auto", device))
    best: dict[str, float] = {}
    for turn in range(args.rounds):
        prompts = prompts_of(args.requests, args.tokens, turn)
        for limit, kinds in ((0.0, ("off",)), (1.0, ("new", "known"))):
            flat = EngineConfig.from_flat(model="z-image", prompt_cache_gib=limit)
            engine = DiffusionEngine(flat, pipeline, device)
            engine.warm_up()
            for kind in kinds:
                best[kind] = min(seconds(engine, prompts), best.get(kind, float("inf")))
            kept = engine.encoded.size / args.requests
            engine.close()
    table = Table(
        "Prompt cache", ("tokens", "off / known", "off / new", "off ms", "new ms", "known ms", "MiB per prompt")
    )
    row = {f"{kind}_ms": 1e3 * value for kind, value in best.items()}
    row |= {"off_/_known": best["off"] / best["known"], "off_/_new": best["off"] / best["new"]}
    table.add(tokens=args.tokens, MiB_per_prompt=kept / 2**20, **row)
    save("prompt_cache.json", [table], device=str(device), torch=torch.__version__)


if __name__ == "__main__":
    main()

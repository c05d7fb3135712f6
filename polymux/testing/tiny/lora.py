"""A tiny LoRA for a tiny pipeline, in diffusers' layout; needs peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polymux.errors import ConfigError
from polymux.testing.tiny.driver import make, open_pipeline, run
from polymux.testing.tiny.registry import DEFAULT, Ctx, find
from polymux.testing.tiny.weights import generator

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def make_lora(name: str, out: Path, ctx: Ctx = DEFAULT, rank: int = 4) -> Path:
    """Write `out/name-lora/pytorch_lora_weights.safetensors` for the checkpoint in `out/name`, made if missing."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    spec = find(name)
    if spec.kind != "diffusers":
        raise ConfigError(f"{name} is a {spec.kind} checkpoint; only diffusers pipelines take a LoRA", param="name")
    path = out / name if (out / name).exists() else make(name, out, ctx)
    pipe = open_pipeline(path, ctx, spec.load)
    part = "unet" if "unet" in pipe.components else "transformer"
    model = pipe.components[part]
    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_" in key:
                noise = torch.randn(p.shape, generator=generator(ctx.seed, f"lora/{key}"))
                p.copy_(noise * (0.3 if "lora_A" in key else 0.5))
    folder = out / f"{name}-lora"
    type(pipe).save_lora_weights(folder, **{f"{part}_lora_layers": get_peft_model_state_dict(model)})
    return folder


def check_lora(name: str, out: Path, ctx: Ctx) -> dict[str, Any]:
    """Make the LoRA and see that it changes the output of the smoke call."""
    folder = make_lora(name, out, ctx)
    base = run(find(name), out / name, ctx)
    with_lora = run(find(name), out / name, ctx, lora=folder)
    moved = max(float((base[key] - with_lora[key]).abs().max()) for key in base)
    return {"name": name, "lora": str(folder), "moved": round(moved, 4), "ok": moved > 1e-3}

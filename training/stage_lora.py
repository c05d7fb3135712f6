"""A style adapter on a finished model: the same captions, drawn as outlines. Only the adapter learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers as D
import torch
from torch import Tensor

from training import evaluate, export, stage_flow, stage_vae
from training.parse import Parser
from training.pool import Pool
from training.run import Pace, Run, sheet
from training.scenes import CANVASES, PLAIN_SHAPES

RANK = 8
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "img_mlp.net.0.proj", "img_mlp.net.2"]
FILLED = tuple(
    s for s in PLAIN_SHAPES if s not in ("ring", "star")
)  # shapes whose middle shows whether they are filled


def train(pipe: D.QwenImagePipeline, pool: Pool, run: Run, pace: Pace, batch: int) -> None:
    """Adds an adapter to the denoiser of `pipe` and trains it."""
    from peft import LoraConfig

    for part in (pipe.text_encoder, pipe.transformer, pipe.vae):
        part.requires_grad_(False)
    latents = stage_vae.to_latents(pipe.vae, pool, run, outline=True)
    pipe.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    learner = stage_flow.Learner(pipe, run)
    learner.head.requires_grad_(False)  # asks what was drawn, which an outline changes little
    learned = sum(p.numel() for p in learner.trained().values())
    run.log(f"adapter of rank {RANK}: {learned} numbers")
    stage_flow.train(learner, stage_flow.to_device(pool, latents, pipe, run), run, pace, stage_flow.Plan(batch))


def save(pipe: D.QwenImagePipeline, folder: Path) -> None:
    """`pytorch_lora_weights.safetensors`, in bf16, as `load_lora_weights` wants it."""
    from peft import get_peft_model_state_dict

    layers = {k: v.detach().to("cpu", torch.bfloat16) for k, v in get_peft_model_state_dict(pipe.transformer).items()}
    D.QwenImagePipeline.save_lora_weights(folder, transformer_lora_layers=layers)


def _hollow(picture: Tensor, parser: Parser) -> bool:
    """Whether the middle of the only thing shows the background at its height."""
    pieces = parser(picture[None])[0]
    if not pieces:
        return False
    piece = max(pieces, key=lambda p: p.width * p.height)
    x, y = int(piece.x), int(piece.y)
    ground = torch.cat([picture[:, y, :3], picture[:, y, -3:]], dim=1).median(dim=1).values
    return float((picture[:, y, x] - ground).norm()) < 0.17


def evaluate_style(model: Path, adapter: Path, out: Path, number: int, device: torch.device) -> dict[str, Any]:
    """The share of hollow shapes among prompts of one filled shape, without and with the adapter."""
    pipe, parser = export.load(model, device), Parser()
    asked = [(s, t) for s, t in evaluate.prompts("one", CANVASES[0], 3 * number, 40) if s.things[0].shape in FILLED]
    texts = [text for scene, text in asked if scene.things[0].size != "small"][:number]
    report: dict[str, Any] = {}
    for name in ("without", "with"):
        if name == "with":
            pipe.load_lora_weights(adapter)
        paint = evaluate.painter(pipe, evaluate.STEPS, 4 if device.type == "cpu" else 150)
        pictures = paint(texts, CANVASES[0], evaluate.GUIDANCE, 1000)
        report[f"hollow {name} the adapter"] = sum(_hollow(p, parser) for p in pictures) / len(pictures)
        sheet(paint(list(evaluate.SHOWN), CANVASES[0], evaluate.GUIDANCE, 1), out / f"outline_{name}.png", 4)
    return report

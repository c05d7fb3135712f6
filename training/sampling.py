"""Pictures from the parts in training, by the fast forwards: what the pipeline's own call computes, without a pipeline.

For the scores that are taken while training runs; the scores of a finished model come from the pipeline itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import diffusers as D
import torch
from torch import Tensor

from training import components, fast, stage_text
from training.run import Run
from training.scenes import CANVASES


def sigmas(steps: int) -> Tensor:
    """Noise levels of the pipeline's steps, and zero."""
    s = torch.linspace(1.0, 1 / steps, steps)
    return torch.cat([components.SHIFT * s / (1 + (components.SHIFT - 1) * s), torch.zeros(1)])


def guided(with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Guidance as `QwenImagePipeline` does it: each token keeps the length that it has with the text alone."""
    both = without + guidance * (with_text - without)
    return both * (with_text.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))


@dataclass
class Sampler:
    """Prompts to pictures in 0..1 of one canvas."""

    pipe: D.QwenImagePipeline
    run: Run
    steps: int = 16
    guidance: float = 3.0

    @torch.no_grad()
    def __call__(self, texts: list[str], canvas: int, noise: Tensor) -> Tensor:
        """`noise` is (texts, tokens, channels)."""
        width, height = CANVASES[canvas]
        grid = (height // 16, width // 16)
        denoise = fast.Denoiser(self.pipe.transformer)
        cos, sin = fast.rotary_tables(self.pipe.transformer, [grid], stage_text.WORDS)
        number, device = len(texts), self.run.device
        rotary = (cos[[0] * number][:, :, None], sin[[0] * number][:, :, None])
        tokens = torch.ones(number, grid[0] * grid[1], dtype=torch.bool, device=device)
        asked = []
        for prompts in (texts, [" "] * number):
            words, lengths = stage_text.of_texts(self.pipe, prompts, self.run)
            seen = torch.arange(words.shape[1], device=device) < lengths[:, None]
            asked.append((words, torch.cat([seen, tokens], 1)))
        x, levels = noise.to(device), sigmas(self.steps).to(device)
        for now, then in itertools.pairwise(levels):
            with self.run.autocast():
                with_text, without = (denoise(x, now.expand(number), w, m, rotary)[0].float() for w, m in asked)
            x = x + (then - now) * guided(with_text, without, self.guidance)
        return self._decoded(x, grid)

    def _decoded(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        vae = self.pipe.vae
        latents = x.unflatten(1, grid).unflatten(-1, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        mean, deviation = (
            torch.tensor(v, device=x.device)[:, None, None] for v in (vae.config.latents_mean, vae.config.latents_std)
        )
        still = fast.StillVAE(vae)
        parts = [still.decode(part * deviation + mean) for part in latents.split(64)]
        return torch.cat(parts).clamp(-1, 1) / 2 + 0.5

"""Do the fast forwards equal the library's own on a small pipeline with random weights? Run before any training."""

from __future__ import annotations

import dataclasses

import diffusers as D
import torch
from torch import Tensor

from training import components, fast
from training.pool import template

TINY = components.Sizes(
    layers=2, heads=2, text_width=64, text_layers=2, text_heads=2, text_mlp=64, vae_base=8, channels=8
)
PROMPTS = ["A red circle", "two small blue squares on the left of a 7-pointed Star, on a white background.", " "]


@dataclasses.dataclass(frozen=True)
class Differences:
    """Largest absolute differences; the compared values are of the order of one."""

    encoded: float
    decoded: float
    text: float
    velocity: float

    def worst(self) -> float:
        return max(dataclasses.astuple(self))


def random_pipeline(sizes: components.Sizes = TINY, seed: int = 0) -> D.QwenImagePipeline:
    """Fresh weights, with noise in place of those that start at zero."""
    pipe = components.pipeline(sizes, seed)
    with torch.no_grad():
        for part in (pipe.transformer, pipe.text_encoder):
            for p in part.parameters():
                p.add_(torch.randn_like(p) * 0.05)
    return pipe


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@torch.no_grad()
def differences() -> Differences:
    pipe = random_pipeline()
    pictures, latents = torch.rand(2, 3, 96, 160) * 2 - 1, torch.randn(2, TINY.channels, 12, 20)
    still = fast.StillVAE(pipe.vae)
    encoded = _gap(pipe.vae.encode(pictures[:, :, None]).latent_dist.mean[:, :, 0], still.encode(pictures)[0])
    decoded = _gap(pipe.vae.decode(latents[:, :, None]).sample[:, :, 0], still.decode(latents).clamp(-1, 1))

    words, mask = pipe.encode_prompt(PROMPTS, device=torch.device("cpu"))
    before, after = template(pipe.prompt_template_encode)
    ids = pipe.tokenizer([before + p + after for p in PROMPTS], padding=True, return_tensors="pt").input_ids
    head = ids[0, : components.TEMPLATE_TOKENS]
    mine = fast.TextEncoder(pipe.text_encoder, head)(ids[:, components.TEMPLATE_TOKENS :])
    text = _gap(words, mine * mask[..., None])

    number, grid = len(PROMPTS), (6, 10)
    tokens, sigma = torch.randn(number, 60, 4 * TINY.channels), torch.rand(number)
    theirs = pipe.transformer(
        hidden_states=tokens,
        timestep=sigma,
        encoder_hidden_states=words,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, *grid)]] * number,
        return_dict=False,
    )[0]
    cos, sin = fast.rotary_tables(pipe.transformer, [(8, 8), grid], words.shape[1])
    rotary = (cos[[1] * number][:, :, None], sin[[1] * number][:, :, None])
    seen = torch.cat([mask.bool(), torch.arange(64).expand(number, -1) < 60], 1)
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, 4))
    found, _ = fast.Denoiser(pipe.transformer)(padded, sigma, words, seen, rotary)
    return Differences(encoded, decoded, text, _gap(theirs, found[:, :60]))

"""Fill models with random weights that depend on nothing but the seed and each tensor's name.

A tensor is drawn from a generator of its own, seeded with crc32("<seed>/<component>/<tensor name>"), so its value does
not depend on a library's init code, on construction order, or on other tensors. Nothing is left at zero or one:
zero-initialised output layers and unit norms are perturbed, so that a test notices a tensor which was not loaded or
was loaded into the wrong place.
"""

from __future__ import annotations

import math
import re
import zlib
from typing import Any, TypeVar

import torch

from polymux.testing.tiny.registry import Ctx

_NORM = re.compile(r"(norm|ln_|layernorm|layer_norm|rms|ln\d|bn\d?)\w*\.(weight|gamma)$|\.gamma$|norm\w*$", re.I)
_GAIN = re.compile(r"(parametrizations\.weight\.original0|weight_g)$")  # of a weight-normalised convolution
_SNAKE = re.compile(r"(snake|act)\w*\.(alpha|beta)$|\.(alpha|beta)$")
_LAYER_SCALE = re.compile(r"layer_scale|\bscale$")
_TOKEN_TABLE = re.compile(r"(embed\w*|shared|wte|wpe)\.weight$")
_POSITIVE = re.compile(r"(running_var|cluster_usage|cluster_size|latents_std)$")
_CODEBOOK = re.compile(r"(embed_sum|embed_avg|codebook\.embed|\.embed|running_mean|latents_mean)$")

M = TypeVar("M", bound=torch.nn.Module)


def generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def _value(name: str, shape: torch.Size, noise: torch.Tensor) -> torch.Tensor:
    """A well-scaled value for parameter `name`, from unit noise of its shape."""
    if _GAIN.search(name):
        return 1.0 + 0.1 * noise
    if _SNAKE.search(name):
        return 1.0 + 0.1 * noise.abs()
    if _LAYER_SCALE.search(name) and len(shape) <= 1:
        return 0.5 + 0.1 * noise
    if len(shape) <= 1 or max(shape) == shape.numel():
        return (1.0 if _NORM.search(name) else 0.0) + 0.1 * noise
    fan_in = math.prod(shape[1:])
    if _TOKEN_TABLE.search(name) and len(shape) == 2 and shape[0] > shape[1]:
        fan_in = 1  # token tables have unit scale
    return noise / math.sqrt(max(fan_in, 1))


@torch.no_grad()
def fill(module: torch.nn.Module, ctx: Ctx, prefix: str) -> None:
    """Overwrite every parameter, and the persistent statistics and codebook buffers, in place."""
    module.eval()
    for name, param in module.named_parameters():
        if param.is_floating_point():
            noise = torch.randn(param.shape, generator=generator(ctx.seed, f"{prefix}/{name}"), dtype=torch.float32)
            param.copy_(_value(name, param.shape, noise).to(param.dtype))
    for name, buffer in module.named_buffers():
        owner = module.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] in owner._non_persistent_buffers_set or not buffer.is_floating_point():
            continue
        noise = torch.randn(buffer.shape, generator=generator(ctx.seed, f"{prefix}/{name}"), dtype=torch.float32)
        if _POSITIVE.search(name):
            buffer.copy_(1.0 + 0.2 * noise.abs())
        elif _CODEBOOK.search(name):
            buffer.copy_(noise)


def filled(ctx: Ctx, model: M, name: str = "model") -> M:
    """The model itself, filled and in the wanted dtype."""
    fill(model, ctx, name)
    return model if ctx.dtype == torch.float32 else model.to(ctx.dtype)  # casting makes diffusers warn


def parts(ctx: Ctx, **components: Any) -> dict[str, Any]:
    """Components of a pipeline by name, the models among them filled."""
    for key, value in components.items():
        if isinstance(value, torch.nn.Module):
            filled(ctx, value, key)
    return components

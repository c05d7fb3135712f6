"""Denoisers of real size with random weights, and inputs for one step of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel

from polymux.memory.layout import all_tensors, set_tensor

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Denoiser:
    """A class, its config, and what one step is called with. `size`: what the step makes, for people."""

    name: str
    cls: type[Any]
    config: dict[str, Any]
    inputs: Callable[[Denoiser, torch.device, torch.dtype], Inputs]
    size: str

    def build(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
        """The same weights for the same seed and device type, made where they are to be."""
        with init_empty_weights(include_buffers=False):
            model: torch.nn.Module = self.cls(**self.config)
        generator = torch.Generator(device).manual_seed(seed)
        in_fp32 = set(self.cls._keep_in_fp32_modules or ())
        for name, tensor in list(all_tensors(model)):
            if tensor.device.type != "meta":
                set_tensor(model, (name,), tensor.to(device))
                continue
            kind = torch.float32 if in_fp32 & set(name.split(".")) else dtype
            value = torch.empty(tensor.shape, dtype=kind, device=device).normal_(0, 0.02, generator=generator)
            if tensor.ndim == 1 and not name.endswith("bias"):
                value += 1  # a gain: with gains near zero a deep model puts out nothing
            set_tensor(model, (name,), value)
        return model.eval().requires_grad_(False)

    def step(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        result = model(**inputs, return_dict=False)[0]
        assert isinstance(result, torch.Tensor)
        return result


def _picture(denoiser: Denoiser, device: torch.device, dtype: torch.dtype) -> Inputs:
    side = int(denoiser.size) // 16
    random = _random(device, dtype)
    return {
        "hidden_states": random(1, side * side, 64),
        "encoder_hidden_states": random(1, 128, denoiser.config["joint_attention_dim"]),
        "encoder_hidden_states_mask": torch.ones(1, 128, device=device, dtype=torch.long),
        "timestep": random(1).abs(),
        "img_shapes": [[(1, side, side)]],
    }


def _video(denoiser: Denoiser, device: torch.device, dtype: torch.dtype) -> Inputs:
    width, height, frames = map(int, denoiser.size.split("x"))
    random = _random(device, dtype)
    return {
        "hidden_states": random(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8),
        "encoder_hidden_states": random(1, 512, denoiser.config["text_dim"]),
        "timestep": torch.full((1,), 500, device=device),
    }


def _random(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return lambda *shape: torch.randn(*shape, device=device, dtype=dtype, generator=generator)


def denoisers(tiny: bool, layers: int | None) -> list[Denoiser]:
    """The two of docs/offload.md; `tiny`: to see that a script works."""
    qwen: dict[str, Any] = {"num_layers": layers or 60, "joint_attention_dim": 3584}
    wan: dict[str, Any] = {"num_layers": layers or 40, "text_dim": 4096}
    if tiny:
        qwen |= {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 32, "num_layers": 5}
        qwen |= {"axes_dims_rope": (4, 6, 6)}
        wan |= {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 64, "text_dim": 32, "num_layers": 4}
    return [
        Denoiser("qwen-image", QwenImageTransformer2DModel, qwen, _picture, "64" if tiny else "1024"),
        Denoiser("wan-14b", WanTransformer3DModel, wan, _video, "64x48x5" if tiny else "832x480x33"),
    ]

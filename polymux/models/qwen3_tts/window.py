"""The codec's decoder layers, transformers' own, of which each frame sees so many frames before it.

Keys and values of these are kept from part to part, always as many; those from before the first frame are masked.
"""

from __future__ import annotations

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavTransformerLayer,
    Qwen3OmniMoeRMSNorm,
    Qwen3OmniMoeRotaryEmbedding,
)

from polymux.models.layer_caches import CACHE, Window
from polymux.models.memory import Memory
from polymux.models.qwen3_tts.configs import Values

Tensor = torch.Tensor
_LAYERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "sliding_window",
    "layer_scale_initial_scale",
)


class WindowLayers(torch.nn.Module):
    """(rows, n, channels) to the same."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        theta = float(values.get("rope_theta", 10000))
        given = {name: values[name] for name in _LAYERS if name in values}
        config = Qwen3OmniMoeCode2WavConfig(rope_parameters={"rope_type": "default", "rope_theta": theta}, **given)
        config._attn_implementation = "sdpa"
        self.config = config
        self.window = config.sliding_window - 1  # frames before, that a frame sees
        layers = [Qwen3OmniMoeCode2WavTransformerLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = torch.nn.ModuleList(layers)
        self.norm = Qwen3OmniMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3OmniMoeRotaryEmbedding(config)
        self.input_proj = torch.nn.Linear(values["latent_dim"], config.hidden_size)
        self.output_proj = torch.nn.Linear(config.hidden_size, values["latent_dim"])

    def forward(self, x: Tensor, first: Tensor, memory: Memory) -> Tensor:
        """`first` (rows, 1): the number of the first frame."""
        count = x.shape[1]
        frame = torch.arange(count, device=x.device)
        other = torch.arange(-self.window, count, device=x.device)
        near = (other <= frame[:, None]) & (other >= frame[:, None] - self.window)
        mask = near & (other >= -first)[:, None]
        positions = first + frame
        hidden = self.input_proj(x)
        angles = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            cache = Window(memory, self.window)
            around = {"position_embeddings": angles, "position_ids": positions, CACHE: cache}
            hidden = layer(hidden, attention_mask=mask[:, None], **around)
        made: Tensor = self.output_proj(self.norm(hidden))
        return made

"""A stack of transformers' decoder layers. Knows neither codes nor requests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from polymux.models.layer_caches import CACHE, FEW, LayerCache, few

Tensor = torch.Tensor


class Layers(torch.nn.Module):
    """The base of a talker and of a code predictor, which add what they embed."""

    def __init__(self, config: Qwen3Config, attention: str, numbered: bool = True) -> None:
        """`numbered`: layers tell their cache which one they are; code that is compiled for one is that of all if they
        do not."""
        super().__init__()
        AttentionInterface.register(FEW, few)
        config._attn_implementation = attention
        self.config = config
        numbers = [i if numbered else 0 for i in range(config.num_hidden_layers)]
        self.layers = torch.nn.ModuleList(Qwen3DecoderLayer(config, number) for number in numbers)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def through(self, hidden: Tensor, positions: Tensor, cache: LayerCache | None, **more: Any) -> Tensor:
        """`hidden` (rows, n, channels) at `positions` (1, n), each of which sees what came before it. `more`: for the
        attention."""
        angles = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            around = {"position_embeddings": angles, "position_ids": positions, CACHE: cache}
            hidden = layer(hidden, **around, **more)
        normed: Tensor = self.norm(hidden)
        return normed

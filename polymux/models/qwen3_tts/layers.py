"""A stack of transformers' decoder layers, whose attention knows a step of many rows.

With one query per row and a mask, the queries of heads that share their keys stand side by side, so that no key is
copied. Knows neither codes nor requests.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

Tensor = torch.Tensor
ATTENTION = "polymux_rows"
# What versions of transformers call a layer's cache.
CACHE = "cache" if "cache" in inspect.signature(Qwen3DecoderLayer.forward).parameters else "past_key_values"


class LayerCache(Protocol):
    """What a layer puts its keys and values into, and which ones it sees then."""

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]: ...


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """What layers call: (rows, heads, queries, channels)."""
    if query.shape[2] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    made = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs["scaling"])
    return made.reshape(query.shape[0], 1, query.shape[1], -1), None


class Layers(torch.nn.Module):
    """The base of a talker and of a code predictor, which add what they embed."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        AttentionInterface.register(ATTENTION, attention)
        config._attn_implementation = ATTENTION
        self.config = config
        self.layers = torch.nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def through(self, hidden: Tensor, positions: Tensor, cache: LayerCache, mask: Tensor | None = None) -> Tensor:
        """`hidden` (rows, n, channels) at `positions` (rows or 1, n). Without a mask, each sees what came before it."""
        angles = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            around = {"position_embeddings": angles, "position_ids": positions, CACHE: cache}
            hidden = layer(hidden, attention_mask=mask, **around)
        normed: Tensor = self.norm(hidden)
        return normed

"""A stack of transformers' decoder layers, and the attention of one that knows few positions.

Knows neither codes nor requests.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

Tensor = torch.Tensor
FEW = "polymux_few"
# What versions of transformers call a layer's cache.
CACHE = "cache" if "cache" in inspect.signature(Qwen3DecoderLayer.forward).parameters else "past_key_values"


class LayerCache(Protocol):
    """What a layer puts its keys and values into, and which ones it sees then."""

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]: ...


class Few:
    """The cache of one layer for a few positions, known beforehand, one of which is computed at a time."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        """keys, values (rows, heads, positions, channels); at (1): the position."""
        self._keys, self._values, self._at = keys, values, at

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._keys.index_copy_(2, self._at, key), self._values.index_copy_(2, self._at, value)


def few(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """What layers call: (rows, heads, 1, channels), and (rows, fewer heads, positions, channels), of which a mask
    (positions) says which are there. As products and sums, which are fused to one kernel where they are compiled."""
    rows, heads, _, channels = key.shape
    grouped = query.view(rows, heads, -1, 1, channels).float()
    scores = (grouped * key[:, :, None].float()).sum(-1) * kwargs["scaling"]
    shares = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    made = (shares[..., None] * value[:, :, None].float()).sum(-2)
    return made.to(query.dtype).view(rows, 1, -1, channels), None


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

"""What layers of transformers take for a cache: of a few positions that are known beforehand, or of a window.

Shapes stay the same from call to call, so that one graph, or one compilation, serves all. Knows neither codes nor
requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from polymux.models.memory import Memory

Tensor = torch.Tensor
FEW = "polymux_few"  # in transformers' registry of attention functions
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


class Window:
    """As a layer knows a cache: its keys and values come behind those that are kept."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory, self._count = memory, count

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._with(key), self._with(value)

    def _with(self, x: Tensor) -> Tensor:
        return self._memory.before(x.transpose(2, 3), self._count).transpose(2, 3)


def one_by_one(decoder: Any, rows: int, positions: int, like: Tensor) -> Callable[[Tensor, int], Tensor]:
    """The layers of a decoder whose attention is FEW: from (rows, 1, channels) at a position, in their order, to
    (rows, channels), which are not normed."""
    config = decoder.config
    shape = (rows, config.num_key_value_heads, positions, config.head_dim)
    kept = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in decoder.layers]
    every = torch.arange(positions, device=like.device)
    cosines, sines = decoder.rotary_emb(like, every[None])

    def run(hidden: Tensor, position: int) -> Tensor:
        at = every[position : position + 1]
        angles = (cosines[:, position, None], sines[:, position, None])
        for layer, (keys, values) in zip(decoder.layers, kept, strict=True):
            around = {"position_embeddings": angles, CACHE: Few(keys, values, at)}
            hidden = layer(hidden, attention_mask=every <= at, **around)
        return hidden[:, 0]

    return run

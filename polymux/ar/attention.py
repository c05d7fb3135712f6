"""Attention over paged keys and values, under a name in transformers' registry of attention functions.

The network hands its queries, keys and values over; keys and values go into the cache, and each token looks at those of
its own sequence there. To whatever traces the network this is one operation, from tensors to a tensor: where the cache
is and what the batch looks like is found by a number. Knows nothing of networks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from polymux.ar.paged_cache import Layer, Looks, Steps, Stretches, opened

IMPLEMENTATION = "polymux_paged"
PADDING = 2  # times the tokens that sequences have: so many are read for them, side by side


def register(model: torch.nn.Module) -> None:
    """So that this model can be told to use it."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    for module in model.modules():
        if (number := getattr(module, "layer_idx", None)) is not None:
            # As a tensor: code that is compiled for one layer asks whether numbers are the same in the next one.
            module.__dict__["paged_layer"] = torch.tensor(number)


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls, with (1, heads, tokens, channels). Among the rest: `paged`, the number of the cache."""
    queries, keys, values = (one[0].transpose(0, 1) for one in (query, key, value))
    return attend(queries, keys, values, kwargs["paged"], module.paged_layer, kwargs["scaling"])[None], None


@torch.library.custom_op("polymux::attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: int, layer: torch.Tensor, scaling: float
) -> torch.Tensor:
    """(tokens, heads, channels) of each; `layer` () on the host. What it writes into the cache, only it reads."""
    cache, looks = opened(handle), Looks(query, key, value, scaling)
    kept = cache.layer(int(layer))
    match cache.batch:
        case Steps() as steps if query.is_cuda:
            from polymux.ar.attention_triton import decode  # there is no Triton without a GPU

            return decode(looks, kept, steps)
        case Steps() as steps:
            return look_steps(looks, kept, steps)
        case Stretches() as stretches:
            return look_stretches(looks, kept, stretches)
    raise RuntimeError("the network runs, and no batch is set")


@attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: int, layer: torch.Tensor, scaling: float
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def look_steps(looks: Looks, layer: Layer, steps: Steps) -> torch.Tensor:
    """One token of each sequence: side by side where they are of similar length, else one after the other. For a CPU,
    where to ask a tensor for a number is free."""
    layer.write(steps.slots, looks.key, looks.value)
    lengths = [position + 1 for position in steps.positions.tolist()]
    if len(lengths) * max(lengths) <= PADDING * sum(lengths):
        return _side_by_side(looks, layer, steps, max(lengths))
    made = torch.empty_like(looks.query, memory_format=torch.contiguous_format)
    for i, (row, length) in enumerate(zip(steps.rows.tolist(), lengths, strict=True)):
        keys, values = layer.read(layer.table[row], length)
        query = looks.query[i][None, :, None]
        seen = scaled_dot_product_attention(query, keys, values, scale=looks.scaling, enable_gqa=True)
        made[i] = seen[0, :, 0]
    return made


def _side_by_side(looks: Looks, layer: Layer, steps: Steps, longest: int) -> torch.Tensor:
    blocks = layer.table[steps.rows, : -(-longest // layer.block_size)]
    keys, values = (kept[blocks].flatten(1, 2)[:, :longest].transpose(1, 2) for kept in (layer.keys, layer.values))
    there = torch.arange(longest, device=blocks.device) <= steps.positions[:, None]
    seen = scaled_dot_product_attention(
        looks.query[:, :, None], keys, values, there[:, None, None], scale=looks.scaling, enable_gqa=True
    )
    return seen[:, :, 0]


def look_stretches(looks: Looks, layer: Layer, batch: Stretches) -> torch.Tensor:
    """Each piece looks at itself and at what came before it."""
    layer.write(batch.slots, looks.key, looks.value)
    made = torch.empty_like(looks.query, memory_format=torch.contiguous_format)
    for group in batch.wholes:
        query, key, value = (
            one[group.index].transpose(1, 2)  # (prompts, heads, tokens, channels)
            for one in (looks.query, looks.key, looks.value)
        )
        seen = scaled_dot_product_attention(query, key, value, is_causal=True, scale=looks.scaling, enable_gqa=True)
        made[group.tokens] = seen.transpose(1, 2).flatten(0, 1)[group.places]
    for part in batch.stretches:
        keys, values = layer.read(part.blocks, part.length)
        query = looks.query[part.begin : part.end].transpose(0, 1)[None]
        repeat = query.shape[1] // keys.shape[1]
        if repeat > 1:  # masks and groups exclude each other in the fast kernels
            keys, values = (one.repeat_interleave(repeat, dim=1) for one in (keys, values))
        mask = causal_lower_right(part.end - part.begin, part.length)
        seen = scaled_dot_product_attention(query, keys, values, mask, scale=looks.scaling)
        made[part.begin : part.end] = seen[0].transpose(0, 1)
    return made

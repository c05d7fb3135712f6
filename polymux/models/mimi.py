"""Mimi's decoder, transformers' own modules, for a sound that comes in parts: from codes to samples.

A part comes with what was kept of the parts before, and gives what is to be kept; so a stream's samples are those of
the whole. Knows nothing of who wrote the codes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.models.mimi.modeling_mimi import MimiConv1d, MimiConvTranspose1d, MimiResnetBlock

from polymux.models.layer_caches import CACHE, Window
from polymux.models.memory import Memory

Tensor = torch.Tensor
Kept = tuple[Tensor, ...]


def refusal(config: Any) -> str | None:
    """Why the sound of such a codec cannot be made in parts, if it cannot."""
    if config.use_causal_conv and config.trim_right_ratio == 1 and config.pad_mode == "constant":
        return None
    return "its codec hears what comes later"


class MimiParts:
    """Of one codec."""

    def __init__(self, codec: Any) -> None:
        inside = codec.decoder
        nested = "decoder_seanet" in inside._modules  # by the version of transformers
        holder = inside if nested else codec
        self._quantizer, self._codes = codec.quantizer, int(codec.config.codebook_size)
        self._upsample, self._layers = holder.upsample, holder.decoder_transformer
        self._convolutions = inside.decoder_seanet if nested else inside
        self._window = int(codec.config.sliding_window) - 1  # positions before, that a position sees
        own_config(self._layers)._attn_implementation = "sdpa"  # which takes masks as they are made here

    def decode(self, codes: Tensor, kept: Kept = ()) -> tuple[Tensor, Kept]:
        """Samples (rows, 1, samples) of the next n frames, codes (rows, groups, n), and what the next part needs."""
        first = kept[0] if kept else codes.new_zeros(len(codes), 1)
        memory = Memory(kept[1] if kept else None)
        # A model may write codes that are no sound, and what a device says to an index too large is the end of all.
        x = self._quantizer.decode(codes.clamp(max=self._codes - 1))
        x = _fed(self._upsample, x, memory)
        count = x.shape[2]
        x = self._seen(x.transpose(1, 2), first, memory).transpose(1, 2)
        for layer in self._convolutions.layers:
            x = _fed(layer, x, memory)
        return x, (first + count, memory.new())

    def _seen(self, hidden: Tensor, first: Tensor, memory: Memory) -> Tensor:
        """`first` (rows, 1): the number of the first position."""
        here = torch.arange(hidden.shape[1], device=hidden.device)
        other = torch.arange(-self._window, hidden.shape[1], device=hidden.device)
        near = (other <= here[:, None]) & (other >= here[:, None] - self._window)
        mask = (near & (other >= -first)[:, None])[:, None]
        angles = self._layers.rotary_emb(hidden, first + here)
        for layer in self._layers.layers:
            around = {"position_embeddings": angles, CACHE: Window(memory, self._window)}
            made = layer(hidden, attention_mask=mask, **around)
            hidden = made if isinstance(made, Tensor) else made[0]
        return hidden


def own_config(module: Any) -> Any:
    """The config of a module and of what is in it, which is a part of another one's: now it is theirs alone."""
    shared, own = module.config, copy.deepcopy(module.config)
    for each in module.modules():
        if vars(each).get("config") is shared:
            each.config = own
    return own


def _fed(layer: Any, x: Tensor, memory: Memory) -> Tensor:
    """What a layer makes of the next columns `x` (rows, channels, n)."""
    made: Tensor
    if isinstance(layer, MimiResnetBlock):
        made = x
        for inner in layer.block:
            made = _fed(inner, made, memory)
        return _fed(layer.shortcut, x, memory) + made
    if isinstance(layer, MimiConv1d):
        (kernel,), (dilation,) = layer.conv.kernel_size, layer.conv.dilation
        made = layer.conv(memory.before(x, (kernel - 1) * dilation))
    elif isinstance(layer, MimiConvTranspose1d):
        (kernel,), (stride,) = layer.conv.kernel_size, layer.conv.stride
        reach = -(-kernel // stride) - 1
        columns = layer.conv(memory.before(x, reach))
        made = columns[..., reach * stride : (reach + x.shape[-1]) * stride]
    else:
        made = layer(x)
    return made

"""The attention of a model whose sequence is split: by heads (Ulysses), in a ring, or both.

It takes the place of a layer's kernel in diffusers' dispatcher, and calls that kernel with what this rank has to
compute. Layers that call torch's attention themselves are met there, while they run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from polymux.errors import ConfigError, GenerationError
from polymux.parallel.early import EarlyValues
from polymux.parallel.exchange import gather, heads_for_tokens, send_heads, shares, tokens_for_heads
from polymux.parallel.groups import Lengths, Turn
from polymux.parallel.ring import MASKED, ring_attention

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


class SplitAttention:
    """The attention of one layer. diffusers hands it to the backend as what it calls the parallel configuration."""

    def __init__(self, turn: Turn, place: int, kernel: Kernel, square_masks: bool = False) -> None:
        self._turn, self._place, self._kernel = turn, place, kernel
        self._square_masks = square_masks
        self.early: EarlyValues | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """This rank's part of the result. Tensors are (batch, tokens, heads, channels), and of all heads."""
        groups, heads = self._turn.groups, query.shape[2]
        queries, keys = self._turn.lengths(self._place, (query.shape[1], key.shape[1]), query.device)
        if key.shape[2] != heads:  # grouped: so that keys go where their queries do
            key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
        if mask is not None:
            mask = self._whole_mask(mask, keys, query.shape)
        degree, rank = groups.ulysses_degree, groups.whole.rank()
        ring_rank = rank // degree
        mine = slice(ring_rank * degree, (ring_rank + 1) * degree)
        if groups.ulysses is not None:
            query, key, value = self._to_heads(query, key, value, (queries[mine], keys[mine]))
            if mask is not None and mask.shape[1] > 1:
                mask = torch.split(mask, list(shares(heads, degree)), dim=1)[groups.ulysses.rank()]
        if not query.shape[2]:
            result = query  # more ranks than heads
        elif groups.ring is None:
            result = self._kernel(query, key, value, mask, scale)
        else:
            rings = tuple(sum(keys[i : i + degree]) for i in range(0, len(keys), degree))
            result = ring_attention(query, key, value, _bias(mask, query), scale, (rings, groups.ring))
        if groups.ulysses is None:
            return result
        return heads_for_tokens(result, heads, queries[mine], groups.ulysses)

    def _to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Lengths, Lengths]
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = self._turn.groups.ulysses
        assert group is not None
        queries, keys = lengths
        early = None if self.early is None else self.early.take(value)
        if early is not None:
            coming = [send_heads(query, queries, group), send_heads(key, keys, group), early]
            query, key, value = (x.wait() for x in coming)
        elif queries == keys and query.shape == key.shape == value.shape:
            query, key, value = tokens_for_heads((query, key, value), keys, group)
        else:
            (query,) = tokens_for_heads((query,), queries, group)
            key, value = tokens_for_heads((key, value), keys, group)
        return query, key, value

    def _whole_mask(self, mask: Tensor, keys: Lengths, query: torch.Size) -> Tensor:
        """(batch or 1, heads or 1, 1, all keys), out of the ranks' parts."""
        own = keys[self._turn.groups.whole.rank()]
        if mask.ndim == 2:
            mask = mask[:, None, None]
        if self._square_masks and mask.dtype == torch.bool:
            mask = mask.any(dim=2, keepdim=True)
        if mask.ndim != 4 or mask.shape[2] != 1 or mask.shape[3] != own:
            raise GenerationError(
                f"sequence parallelism: an attention mask of shape {list(mask.shape)} for queries of shape "
                f"{list(query)} does not say for each of this rank's {own} keys whether it is seen"
            )
        return gather(mask, 3, keys, self._turn.groups.whole)


def _bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, MASKED)
    return mask.to(like.dtype).clamp(min=MASKED)


@functools.cache
def split_backend(kernel: AttentionBackendName) -> AttentionBackendName:
    """The name under which diffusers' dispatcher finds split attention around this kernel.

    A name of our own beside those that the dispatcher's enumeration lists: it looks names up in its registry, and asks
    of them no more than to be of this type.
    """
    text = f"split {kernel.value}"
    name = str.__new__(AttentionBackendName, text)
    name._name_, name._value_ = text, text
    if name not in _AttentionBackendRegistry._backends:
        _AttentionBackendRegistry.register(name)(_around(kernel))
    return name


def _around(kernel: AttentionBackendName) -> Callable[..., Tensor]:
    plain = dispatched(kernel)

    def split_attention(  # noqa: PLR0913 (the dispatcher's)
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: SplitAttention | None = None,
    ) -> Tensor:
        if _parallel_config is None:  # the layer says so itself: its keys are whole on every rank
            return plain(query, key, value, attn_mask, scale)
        if is_causal:
            raise GenerationError("sequence parallelism: causal attention cannot be split")
        return _parallel_config(query, key, value, attn_mask, scale)

    return split_attention


@functools.cache
def dispatched(kernel: AttentionBackendName) -> Kernel:
    """A kernel of diffusers' dispatcher, on one rank."""
    function = _AttentionBackendRegistry._backends[kernel]
    takes = _AttentionBackendRegistry._supported_arg_names[kernel]

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        more: Mapping[str, Any] = {"attn_mask": mask, "scale": scale, "enable_gqa": query.shape[2] != key.shape[2]}
        result: Tensor = function(query=query, key=key, value=value, **{k: v for k, v in more.items() if k in takes})
        return result

    return call


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's own."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


class MeetAttention(TorchFunctionMode):
    """While a layer runs, its calls of torch's attention are those of `split`."""

    def __init__(self, split: SplitAttention) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attention(*args, **(kwargs or {}))

    def _attention(  # noqa: PLR0913 (torch's)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal or not math.isclose(dropout_p, 0):
            raise GenerationError("sequence parallelism: causal attention and dropout cannot be split")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._split(q, k, v, attn_mask, scale).transpose(1, 2)


def kernel_of(processor: Any, ring: bool) -> AttentionBackendName:
    """The kernel that a processor uses. In a ring, results must tell their sums, which torch's own kernels do."""
    name = processor._attention_backend
    if name is None:
        name, _ = _AttentionBackendRegistry.get_active_backend()
    kernel = AttentionBackendName(name)
    if ring and kernel is not AttentionBackendName.NATIVE:
        raise ConfigError(
            f"ring attention computes with torch's own kernels, not with {kernel.value}: use Ulysses with it, or leave "
            "the attention backend to its default",
            param="ring_degree",
        )
    return kernel

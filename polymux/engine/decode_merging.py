"""Steps of several requests as one: each brings one token, and keeps its keys and values in a cache of its own.

The tokens stand side by side in one forward of the decoder, which so reads its weights once for all of them. Attention
is the only place where they would see each other: there, each is led to its own cache, through transformers' registry
of attention functions, and computed as if it were alone. What is not exactly a step of one token (a prompt, another
kind of cache, an argument that nobody here knows) is not merged. Knows neither models nor requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from polymux.diffusion.call import Call
from polymux.diffusion.merging import Merger
from polymux.diffusion.runner import Runner

IMPLEMENTATION = "polymux_side_by_side"
_PLAIN = "sdpa"  # what it stands in for
_CACHES = ("cache", "past_key_values")  # what versions of transformers call it
_TOKENS = ("input_ids", "inputs_embeds")
_ALONG_TOKENS = {"position_ids", "cache_position"}  # tensors whose last axis is that of the tokens
_MASK = "attention_mask"


class SideBySide(list[torch.Tensor]):
    """The keys, or the values, that each token looks at: (1, heads, positions, channels)."""


class SharedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of several caches: the n-th token belongs to the n-th."""

    def __init__(self, layers: Sequence[DynamicLayer]) -> None:
        super().__init__()
        self.own, self.is_initialized = list(layers), True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(1, heads, tokens, channels)."""
        columns = zip(self.own, torch.split(key_states, 1, 2), torch.split(value_states, 1, 2), strict=True)
        kept = [layer.update(key, value) for layer, key, value in columns]
        return SideBySide(key for key, _ in kept), SideBySide(value for _, value in kept)

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        return None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def attention(module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """What transformers calls in place of its own, with `query` (1, heads, tokens, channels)."""
    columns = zip(torch.split(query, 1, 2), key, value, strict=True)
    made = [sdpa_attention_forward(module, one, k, v, None, **kwargs)[0] for one, k, v in columns]
    return torch.cat(made, dim=1), None


class DecodeMerger(Merger):
    """`decoders` and `heads`: paths of what may be merged; heads have no cache, and one row for each token."""

    def __init__(self, decoders: Sequence[str], heads: Sequence[str]) -> None:
        super().__init__()
        self._decoders, self._heads = frozenset(decoders), frozenset(heads)
        AttentionInterface.register(IMPLEMENTATION, attention)

    def tokens(self, call: Call) -> int:
        return 1  # of the budget; what has more is not merged

    def key(self, call: Call) -> Hashable:
        if _path(call) in self._heads:
            return super().key(call) if _rows(call.arguments) == 1 else (id(call),)
        if _path(call) not in self._decoders or not _is_step(call):
            return (id(call),)
        rest = [(n, v) for n, v in call.arguments.items() if not isinstance(v, (torch.Tensor, Cache))]
        return (call.component.name, call.method, call.state, call.weights, frozenset(call.arguments), repr(rest))

    def merge(self, calls: Sequence[Call]) -> dict[str, Any]:
        if _cache_name(calls[0]) is None:
            return super().merge(calls)
        return {name: self._together(name, [call.arguments[name] for call in calls]) for name in calls[0].arguments} | (
            {} if "position_ids" in calls[0].arguments else {"position_ids": _positions(calls)}
        )

    def split(self, calls: Sequence[Call], result: Any) -> list[Any]:
        name = _cache_name(calls[0])
        if name is None:
            return super().split(calls, result)
        return [_part(result, i, call.arguments[name]) for i, call in enumerate(calls)]

    def _together(self, name: str, values: list[Any]) -> Any:
        if name in _CACHES:
            layers = zip(*(cache.layers for cache in values), strict=True)
            return Cache(layers=[SharedLayer(column) for column in layers])
        if name in _TOKENS:
            return torch.cat(values, dim=1)
        if name in _ALONG_TOKENS:
            return torch.cat(values, dim=-1)
        return None if name == _MASK else values[0]


class DecodeRunner(Runner):
    """Runs merged steps with attention that leads each token to its own cache."""

    def _run(self, calls: Sequence[Call], arguments: dict[str, Any]) -> Any:
        if len(calls) == 1 or _cache_name(calls[0]) is None:
            return super()._run(calls, arguments)
        caches = [call.arguments[str(_cache_name(call))] for call in calls]
        lengths = [cache.get_seq_length() for cache in caches]
        try:
            with side_by_side(calls[0].component.module):
                return super()._run(calls, arguments)
        except BaseException:  # whoever runs these steps again must find the caches as they were
            for cache, length in zip(caches, lengths, strict=True):
                _shorten(cache, length)
            raise


@contextmanager
def side_by_side(decoder: torch.nn.Module) -> Iterator[None]:
    """The decoder's attention is `attention` in here."""
    config: Any = decoder.config
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = _PLAIN


def may_be_merged(decoder: torch.nn.Module) -> bool:
    """Whether its attention is the one that `attention` stands in for."""
    config: Any = decoder.config
    return bool(config._attn_implementation == _PLAIN)


def _shorten(cache: Any, length: int) -> None:
    """To so many positions, in every layer."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def _path(call: Call) -> str:
    return f"{call.component.name}.{call.method}"


def _cache_name(call: Call) -> str | None:
    return next((name for name in _CACHES if isinstance(call.arguments.get(name), Cache)), None)


def _rows(arguments: dict[str, Any]) -> int:
    """Positions in a head's only argument, (1, positions, channels) or (1, positions); 0 if it has others."""
    values = list(arguments.values())
    if len(values) != 1 or not isinstance(values[0], torch.Tensor) or not 2 <= values[0].ndim <= 3:
        return 0
    return int(values[0].shape[0] * values[0].shape[1])


def _is_step(call: Call) -> bool:
    """Whether it is one token after others, with nothing in it that this module would not understand. A mask of two
    axes is one that hides nothing: requests are not padded."""
    name, arguments = _cache_name(call), call.arguments
    if name is None:
        return False
    cache = arguments[name]
    if type(cache) is not DynamicCache or not all(type(layer) is DynamicLayer for layer in cache.layers):
        return False
    tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    tokens = [tensors.pop(n) for n in _TOKENS if n in tensors]
    if len(tokens) != 1 or tokens[0].shape[:2] != (1, 1) or cache.get_seq_length() == 0:
        return False
    mask = tensors.pop(_MASK, None)
    plain = not isinstance(arguments.get(_MASK), dict) and (mask is None or mask.ndim == 2)
    return plain and all(n in _ALONG_TOKENS and v.shape[-1] == 1 for n, v in tensors.items())


def _positions(calls: Sequence[Call]) -> torch.Tensor:
    """Where each token stands, if its call does not say: after those that its cache has."""
    name = _cache_name(calls[0])
    given = next(v for n, v in calls[0].arguments.items() if n in _TOKENS)
    return torch.tensor([[call.arguments[str(name)].get_seq_length() for call in calls]], device=given.device)


def _part(value: Any, i: int, cache: Any) -> Any:
    """What of a merged result is that of the i-th token."""
    if isinstance(value, Cache):
        return cache
    if isinstance(value, torch.Tensor):
        return value[:, i : i + 1].contiguous()
    if isinstance(value, dict):
        return type(value)(**{name: _part(one, i, cache) for name, one in value.items()})
    return type(value)(_part(one, i, cache) for one in value) if isinstance(value, (tuple, list)) else value

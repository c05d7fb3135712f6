"""Which calls can run as one, and how they are put together and taken apart again.

Two calls of a component go together if their keys are equal. What a value means follows from its form: a tensor whose
first dimension is the call's batch size is per sample and is concatenated; so is a list of that length, but for lists
of tensors in a call whose samples are the rows of tensors (the outputs of several layers); those and tuples (rotary
cos/sin pairs) are structure; a single number is repeated per sample; every other tensor must have the same contents in
all calls. A family adds rules for padding (prompts of different length). Whether a family's calls may be
merged at all is not decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Cache

from polymux.diffusion.call import Call
from polymux.diffusion.component import Component
from polymux.families.base import Padding


class NotMergeable(Exception):
    """The result of a merged call cannot be taken apart."""


@dataclass(frozen=True)
class Samples:
    """How many samples a call has, and whether they are the items of lists or the rows of tensors."""

    count: int
    listed: bool


NO_SAMPLES = Samples(-1, False)


def samples_of(arguments: dict[str, Any]) -> Samples:
    """As the call's first tensor (or list of tensors) has them. A count of 0: it has none."""
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return Samples(int(value.shape[0]), False)
        if _is_tensor_list(value):
            return Samples(len(value), True)
    return Samples(0, False)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, torch.Tensor) for v in value)


def _is_per_sample(value: Any, samples: Samples) -> bool:
    """Whether a list has an item for every sample."""
    return isinstance(value, list) and len(value) == samples.count and (samples.listed or not _is_tensor_list(value))


def _is_number(value: torch.Tensor) -> bool:
    """A timestep or a guidance scale, with or without an axis."""
    return value.numel() == 1 and value.ndim <= 1


def _positions(x: torch.Tensor) -> int:
    """(batch, tokens, channels) or (batch, channels, *space): all but the channels."""
    return x.shape[0] * x.shape[1] if x.ndim <= 3 else x.numel() // max(x.shape[1], 1)


def _packed(arguments: dict[str, Any], n: int) -> bool:
    """Whether some tensor is not per sample: vision encoders take the patches of all pictures in one row."""
    return any(isinstance(v, torch.Tensor) and v.ndim > 0 and v.shape[0] != n for v in arguments.values())


def tokens_of(component: Component, arguments: dict[str, Any]) -> int:
    """Positions of the first tensor, counted in the component's patches."""
    area = component.patch_area
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return max(_positions(value) // (area if value.ndim > 3 else 1), 1)
        if _is_tensor_list(value):
            return max(sum(_positions(v.unsqueeze(0)) for v in value) // area, 1)
    return 1


class Contents:
    """Digests of tensors that must be equal, each computed once as long as the tensor lives unchanged."""

    def __init__(self) -> None:
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def digest(self, tensor: torch.Tensor) -> bytes:
        version = None if tensor.is_inference() else tensor._version  # None: a change would go unnoticed
        if version is not None and tensor in self.known and self.known[tensor][0] == version:
            return bytes(self.known[tensor][1])
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        self.known[tensor] = (version, digest)
        return digest


class Merger:
    """Keys and merges the calls of one engine by the family's rules."""

    def __init__(self, padding: Sequence[Padding] = (), shared: Sequence[str] = ()) -> None:
        self.shared = frozenset(shared)
        self.padding = tuple(padding)
        self.contents = Contents()

    def _rules(self, call: Call) -> dict[str, Padding]:
        """The padding rules for a call, by argument."""
        rules = (r for r in self.padding if r.role == call.component.role)
        return {r.argument: r for r in rules if r.argument in call.arguments}

    def tokens(self, call: Call) -> int:
        """How much work a call is."""
        return tokens_of(call.component, call.arguments)

    def key(self, call: Call) -> Hashable:
        """Calls with equal keys may run as one."""
        samples = samples_of(call.arguments)
        if samples.count == 0 or (call.component.role == "encoder" and _packed(call.arguments, samples.count)):
            return (id(call),)
        rules = self._rules(call)
        masks = {rule.mask for rule in rules.values()}
        named = tuple(
            (name, self._key(value, NO_SAMPLES if name in self.shared else samples, rules.get(name)))
            for name, value in sorted(call.arguments.items())
            if name not in masks
        )
        return (call.component.name, call.method, call.state, call.weights, named)

    def _key(self, value: Any, samples: Samples, rule: Padding | None = None) -> Hashable:
        n = samples.count
        if isinstance(value, torch.Tensor):
            if rule is not None and value.ndim > rule.dim and value.shape[0] == n:
                return ("padded", *(s for d, s in enumerate(value.shape) if d not in (0, rule.dim)), value.dtype)
            if _is_number(value) and n > 0:
                return ("sample", torch.Size(()), value.dtype)
            if value.ndim > 0 and value.shape[0] == n:
                return ("sample", value.shape[1:], value.dtype)
            return ("equal", value.shape, value.dtype, self.contents.digest(value))
        if _is_per_sample(value, samples):
            if _is_tensor_list(value):
                return ("samples", frozenset((v.ndim, v.dtype) for v in value))
            items = {self._key(v, NO_SAMPLES) for v in value}
            return ("items", *items) if len(items) == 1 else ("object", id(value))
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *(self._key(v, samples) for v in value))
        if isinstance(value, dict):
            return ("dict", *((k, self._key(v, samples)) for k, v in sorted(value.items())))
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return (type(value).__name__, value)
        return ("object", id(value))

    def merge(self, calls: Sequence[Call]) -> dict[str, Any]:
        """The arguments of one call that does the work of all of them, in order."""
        samples = [samples_of(c.arguments) for c in calls]
        rules = self._rules(calls[0])
        masks = {rule.mask for rule in rules.values()}
        merged: dict[str, Any] = {}
        for name, value in calls[0].arguments.items():
            if name in rules:
                merged |= self._pad(rules[name], calls, [s.count for s in samples])
            elif name in self.shared:
                merged[name] = value
            elif name not in masks:
                merged[name] = self._merge([c.arguments[name] for c in calls], samples)
        return merged

    def split(self, calls: Sequence[Call], result: Any) -> list[Any]:
        """One result for each of the merged calls. Raises NotMergeable where the result has no batch axis."""
        samples = [samples_of(c.arguments) for c in calls]
        parts = split(result, [s.count for s in samples], samples[0].listed)
        for rule in self._rules(calls[0]).values():
            lengths = [c.arguments[rule.argument].shape[rule.dim] for c in calls]
            if rule.cut and len(set(lengths)) > 1:
                parts = [_cut(p, rule.dim, max(lengths), length) for p, length in zip(parts, lengths, strict=True)]
        return parts

    def rows(self, calls: Sequence[Call], arguments: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
        """Of the arguments of these calls together, those of some samples. What is per sample, the first call tells: of
        all together, another size may be the same by chance."""
        head, samples = calls[0].arguments, samples_of(calls[0].arguments)
        return {
            name: value if name in self.shared else _rows(value, head.get(name), samples, slice(begin, end))
            for name, value in arguments.items()
        }

    def _merge(self, values: list[Any], samples: list[Samples]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            if all(v.ndim > 0 and v.shape[0] == s.count for v, s in zip(values, samples, strict=True)):
                return torch.cat(values)
            if any(_is_number(v) for v in values):
                return torch.cat([v.reshape(-1).expand(s.count) for v, s in zip(values, samples, strict=True)])
            return first
        if all(_is_per_sample(v, s) for v, s in zip(values, samples, strict=True)):
            return [item for v in values for item in v]
        if isinstance(first, (list, tuple)):
            return type(first)(self._merge([v[i] for v in values], samples) for i in range(len(first)))
        if isinstance(first, dict):
            return {k: self._merge([v[k] for v in values], samples) for k in first}
        return first

    def _pad(self, rule: Padding, calls: Sequence[Call], sizes: list[int]) -> dict[str, Any]:
        """Pad to the longest. Where lengths differ the mask tells real from padded positions."""
        values: list[torch.Tensor] = [c.arguments[rule.argument] for c in calls]
        masks = [c.arguments.get(rule.mask) if rule.mask else None for c in calls]
        lengths = [v.shape[rule.dim] for v in values]
        longest = max(lengths)
        out: dict[str, Any] = {
            rule.argument: torch.cat(
                [_pad_dim(v, rule.dim, longest - length) for v, length in zip(values, lengths, strict=True)]
            )
        }
        given = [m for m in masks if m is not None]
        if rule.mask is None or (len(set(lengths)) == 1 and not given):
            return out
        dtype = given[0].dtype if given else torch.bool
        filled = []
        for mask, value, length, n in zip(masks, values, lengths, sizes, strict=True):
            full = mask if mask is not None else torch.ones(n, length, device=value.device)
            filled.append(_pad_dim(full.to(dtype), 1, longest - length))
        out[rule.mask] = torch.cat(filled)
        return out


def _cut(result: Any, dim: int, padded: int, length: int) -> Any:
    """Without the positions that padding added, wherever they are."""
    if isinstance(result, torch.Tensor):
        return result.narrow(dim, 0, length) if result.ndim > dim and result.shape[dim] == padded else result
    if isinstance(result, dict):
        return type(result)(**{k: _cut(v, dim, padded, length) for k, v in result.items()})
    return tuple(_cut(v, dim, padded, length) for v in result) if isinstance(result, tuple) else result


def _pad_dim(x: torch.Tensor, dim: int, amount: int) -> torch.Tensor:
    return x if amount == 0 else pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, amount))


def _rows(value: Any, single: Any, samples: Samples, which: slice) -> Any:
    """`single`: what the first of the merged calls has in this place; None: nothing, merging has made a mask of it."""
    if isinstance(value, torch.Tensor):
        made = single is None or (_is_number(single) and not _is_number(value))  # a mask; a number for each sample
        return value[which] if made or (single.ndim > 0 and single.shape[0] == samples.count) else value
    if _is_per_sample(single, samples):
        return value[which]
    if isinstance(value, (list, tuple)):
        return type(value)(_rows(item, one, samples, which) for item, one in zip(value, single, strict=True))
    if isinstance(value, dict):
        return {name: _rows(item, single[name], samples, which) for name, item in value.items()}
    return value


def joined(parts: Sequence[Any], listed: bool) -> Any:
    """One result out of those for some samples each: the opposite of `split`. Raises NotMergeable."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise NotMergeable("results of different types")
    if isinstance(first, torch.Tensor):
        if first.ndim == 0 or any(part.shape[1:] != first.shape[1:] for part in parts):
            raise NotMergeable(f"results of shapes {', '.join(str(tuple(part.shape)) for part in parts)}")
        return torch.cat(list(parts))
    if isinstance(first, list) and listed:
        return [item for part in parts for item in part]
    if isinstance(first, dict):
        return type(first)(**{k: joined([part[k] for part in parts], listed) for k in first})
    if type(first) in (tuple, list):
        return type(first)(joined(items, listed) for items in zip(*parts, strict=True))
    if first is None:
        return None
    raise NotMergeable(f"a result of type {type(first).__name__}")


def split(result: Any, sizes: Sequence[int], listed: bool = False) -> list[Any]:
    """One result for each of the merged calls. Raises NotMergeable where the result has no batch axis.

    `listed`: a list has an item for every sample, as the arguments have; otherwise it is structure.
    """
    total = sum(sizes)
    if isinstance(result, torch.Tensor):
        if result.ndim == 0 or result.shape[0] != total:
            raise NotMergeable(f"a result of shape {tuple(result.shape)} for {total} samples")
        return [part.contiguous() for part in torch.split(result, list(sizes))]  # as it would be if it had run alone
    if isinstance(result, list) and listed and len(result) == total:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [result[s : s + n] for s, n in zip(starts, sizes, strict=True)]
    if isinstance(result, dict):
        # Encoders that are language models return a key-value cache unasked. It cannot be taken apart; who wants one
        # passes it in, and calls with such an argument are not merged.
        columns = {k: split(v, sizes, listed) for k, v in result.items() if not isinstance(v, Cache)}
        return [type(result)(**{k: c[i] for k, c in columns.items()}) for i in range(len(sizes))]
    if type(result) is tuple or (type(result) is list and not listed):
        parts = [split(part, sizes, listed) for part in result]
        return [type(result)(p[i] for p in parts) for i in range(len(sizes))]
    if result is None:
        return [None] * len(sizes)
    raise NotMergeable(f"a result of type {type(result).__name__}")

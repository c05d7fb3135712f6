"""Sequence parallelism: each rank has a part of the tokens, and attention brings them together.

What is split, and where it is gathered, the plan says. Parts may differ in length by one token, and ranks in heads by
one head: nothing is padded. All ranks get the same arguments, and all return the whole result.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from polymux.errors import ConfigError, GenerationError
from polymux.families.sharding import Gather, Lengthen, SequencePlan, Split
from polymux.parallel.attention import (
    MeetAttention,
    SplitAttention,
    dispatched,
    kernel_of,
    plain_attention,
    split_backend,
)
from polymux.parallel.early import EarlyValues
from polymux.parallel.exchange import gather
from polymux.parallel.groups import SequenceGroups, Turn
from polymux.parallel.wrapping import Forward, Wrapping, members, shapes_of


class SequenceSharding:
    """What was put on the module, until `undo`."""

    def __init__(self, groups: SequenceGroups) -> None:
        self._turn = Turn(groups)
        self._wrapping = Wrapping()
        self._processors: list[tuple[Any, Any, Any]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._places = 0

    def undo(self) -> None:
        """The module as it was. An engine that has captured its calls must have let go of it before."""
        self._wrapping.undo()
        while self._hooks:
            self._hooks.pop().remove()
        while self._processors:
            processor, backend, config = self._processors.pop()
            processor._attention_backend, processor._parallel_config = backend, config

    def _place(self) -> int:
        self._places += 1
        return self._places

    def _attend(self, layer: Any, square_masks: bool) -> None:
        """Have the attention of a layer see all tokens."""
        processor = layer.processor
        if isinstance(processor._parallel_config if hasattr(processor, "_parallel_config") else None, SplitAttention):
            return  # shared with another layer
        if hasattr(processor, "_parallel_config"):
            kernel = kernel_of(processor, self._turn.groups.ring is not None)
            self._processors.append((processor, processor._attention_backend, processor._parallel_config))
            processor._attention_backend = split_backend(kernel)
            split = SplitAttention(self._turn, self._place(), dispatched(kernel), square_masks)
            processor._parallel_config = split
            values = dict(layer.named_children()).get("to_v")
            if isinstance(values, torch.nn.Linear) and self._turn.groups.ulysses is not None:
                split.early = EarlyValues(self._turn, layer, "to_v")
                self._hooks.append(values.register_forward_hook(split.early))
        else:
            meet = partial(MeetAttention, SplitAttention(self._turn, self._place(), plain_attention, square_masks))
            self._wrapping.around(layer, partial(_within, meet))

    def _move(self, module: torch.nn.Module, steps: Sequence[Split | Gather]) -> None:
        self._wrapping.around(module, partial(_moving, self._turn, steps, [self._place() for _ in steps]))

    def _begin(self, module: torch.nn.Module, lengthen: Sequence[Lengthen]) -> None:
        self._wrapping.around(module, partial(_begun, self._turn, lengthen))


def shard_sequence(module: torch.nn.Module, plan: SequencePlan, groups: SequenceGroups) -> SequenceSharding:
    """Have the module compute on this rank's part of its sequence. Raises ConfigError if it cannot.

    Attention keeps the kernels that were chosen for it before.
    """
    sharding = SequenceSharding(groups)
    try:
        for layer in _attention_layers(module, plan):
            sharding._attend(layer, plan.square_masks)
        steps: dict[str, list[Split | Gather]] = defaultdict(list)
        for step in plan.steps:
            for path in _paths(module, step.module):
                steps[path].append(step)
        for path, its in steps.items():
            sharding._move(module.get_submodule(path), its)
        sharding._begin(module, plan.lengthen)
    except ConfigError:
        sharding.undo()
        raise
    return sharding


def _attention_layers(module: torch.nn.Module, plan: SequencePlan) -> list[torch.nn.Module]:
    if plan.attention:
        layers = [layer for pattern in plan.attention for _, layer in members(module, pattern)]
    else:
        layers = [m for m in module.modules() if hasattr(getattr(m, "processor", None), "_parallel_config")]
    if not layers:
        raise ConfigError(
            f"sequence parallelism: {type(module).__name__} has no attention that is known to be splittable"
        )
    return layers


def _paths(module: torch.nn.Module, pattern: str) -> list[str]:
    found = [path for path, _ in members(module, pattern)]
    if not found:
        raise ConfigError(f"sequence parallelism: {type(module).__name__} has no {pattern!r}, which its plan names")
    return found


def _begun(turn: Turn, lengthen: Sequence[Lengthen], forward: Forward) -> Forward:
    """A forward of the model, which tells itself from others by the shapes of its arguments."""
    signature = inspect.signature(forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        turn.begin((shapes_of(args), shapes_of(kwargs)))
        if lengthen:
            bound = signature.bind(*args, **kwargs)
            for short in lengthen:
                _lengthened(bound.arguments, short, turn.groups.whole.size())
            args, kwargs = bound.args, bound.kwargs
        return forward(*args, **kwargs)

    return call


def _lengthened(arguments: dict[str, Any], short: Lengthen, size: int) -> None:
    tokens, mask = arguments[short.argument], arguments.get(short.mask)
    missing = size - tokens.shape[1]
    if missing <= 0:
        return
    if mask is None:
        mask = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
    arguments[short.argument] = pad(tokens, (0, 0, 0, missing))
    arguments[short.mask] = pad(mask, (0, missing))


def _within(meet: Callable[[], MeetAttention], forward: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        with meet():
            return forward(*args, **kwargs)

    return call


def _moving(turn: Turn, steps: Sequence[Split | Gather], places: Sequence[int], forward: Forward) -> Forward:
    """A module some of whose arguments are split, and some of whose results are split or gathered."""
    names = list(inspect.signature(forward).parameters)
    if missing := [s.argument for s in steps if isinstance(s, Split) and s.argument not in (None, *names)]:
        raise ConfigError(f"sequence parallelism: a module has no argument {missing[0]!r}, which its plan names")
    before = [s for s in steps if isinstance(s, Split) and s.argument is not None]
    after = [(s, place) for s, place in zip(steps, places, strict=True) if s not in before]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for step in before:
            name = step.argument or ""
            if name in kwargs:
                kwargs[name] = _split(turn, step, kwargs[name])
            elif name in names and names.index(name) < len(given):
                given[names.index(name)] = _split(turn, step, given[names.index(name)])
        result = forward(*given, **kwargs)
        for then, place in after:
            result = _replaced(result, then.output or 0, partial(_after, turn, then, place))
        return result

    return call


def _after(turn: Turn, step: Split | Gather, place: int, tensor: Any) -> Any:
    if isinstance(step, Split):
        return _split(turn, step, tensor)
    (lengths,) = turn.lengths(place, (tensor.shape[step.dim],), tensor.device)
    return gather(tensor, step.dim, lengths, turn.groups.whole)


def _split(turn: Turn, step: Split, tensor: Any) -> Any:
    """This rank's part of a tensor, or of each. Other things, and tensors of other forms, are left as they are."""
    if isinstance(tensor, (tuple, list)):
        return type(tensor)(_split(turn, step, item) for item in tensor)
    if not isinstance(tensor, torch.Tensor) or step.ndim not in (None, tensor.ndim):
        return tensor
    whole = [turn.split[name] for name in step.joins] or [tensor.shape[step.dim]]
    if min(whole) < turn.groups.whole.size():
        what = step.argument or step.module
        raise GenerationError(
            f"sequence parallelism: {what} has {min(whole)} tokens, fewer than the {turn.groups.whole.size()} ranks"
        )
    if step.argument is not None and not step.joins:
        turn.split[step.argument] = whole[0]
    parts = [
        piece.narrow(step.dim, *turn.part(n))
        for piece, n in zip(torch.split(tensor, whole, step.dim), whole, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, step.dim)


def _replaced(result: Any, position: int, change: Callable[[Any], Any]) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(change(item) if i == position else item for i, item in enumerate(result))
    return change(result)

"""Which plan a model has: the one that its family declares, or else diffusers' own, read into the same form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.modeling_utils import ModelMixin

from polymux.errors import ConfigError
from polymux.families import sharding_of
from polymux.families.sharding import Cut, Gather, SequencePlan, Sharding, Split, TensorPlan

# A class is enough: what a model cannot do is known before it is loaded.
Model = torch.nn.Module | type[torch.nn.Module]


def sequence_plan(model: Model) -> SequencePlan:
    """Raises ConfigError if nobody says how the model's sequence is split."""
    cls = model if isinstance(model, type) else type(model)
    for declared in _declared(cls):
        if declared.sequence is not None:
            return declared.sequence
    theirs = _plans(cls)[0]
    if not theirs:
        kind = cls.__name__
        raise ConfigError(
            f"sequence parallelism: nothing says how the sequence of {kind} is split", param="ulysses_degree"
        )
    return SequencePlan(steps=tuple(_steps(theirs)))


def tensor_plan(model: Model) -> TensorPlan:
    """Raises ConfigError if nobody says how the model's layers are divided."""
    cls = model if isinstance(model, type) else type(model)
    for declared in _declared(cls):
        if declared.tensor is not None:
            return declared.tensor
    theirs = _plans(cls)[1]
    if not theirs:
        kind = cls.__name__
        raise ConfigError(
            f"tensor parallelism: nothing says how the layers of {kind} are divided", param="tensor_parallel_size"
        )
    return TensorPlan(cuts=tuple(_cut(layer, style) for layer, style in theirs.items()))


def _declared(cls: type[torch.nn.Module]) -> Iterator[Sharding]:
    """For the class, or for one that it inherits from, as the classes that torch's FSDP makes do."""
    found = (sharding_of(kind.__name__) for kind in cls.__mro__)
    return (sharding for sharding in found if sharding is not None)


def _plans(cls: Any) -> tuple[Any, Any]:
    """diffusers' own, for the sequence and for the layers."""
    return (cls._cp_plan, cls._tp_plan) if issubclass(cls, ModelMixin) else (None, None)


def _steps(plan: Mapping[str, Any]) -> Iterator[Split | Gather]:
    for module, entry in plan.items():
        if isinstance(entry, Mapping):
            for key, split in entry.items():
                assert isinstance(split, ContextParallelInput)
                where: dict[str, Any] = {"output": key} if isinstance(key, int) else {"argument": key}
                yield Split(module=module, dim=split.split_dim, ndim=split.expected_dims, **where)
        else:
            outputs = [entry] if isinstance(entry, ContextParallelOutput) else entry
            for position, output in enumerate(outputs):
                if output is not None:
                    yield Gather(module=module, output=position, dim=output.gather_dim)


def _cut(layer: str, style: object) -> Cut:
    if isinstance(style, PackedColwiseParallel):
        return Cut(layer=layer, by="column", parts=tuple(style.blocks or ()) or "_tp_packed_col_blocks")
    if isinstance(style, PackedRowwiseParallel):
        return Cut(layer=layer, by="row", parts=tuple(style.blocks or ()) or "_tp_packed_row_blocks")
    if style not in ("colwise", "rowwise"):
        raise ConfigError(f"tensor parallelism: {layer}: diffusers' style {style!r} is not known here")
    return Cut(layer=layer, by="column" if style == "colwise" else "row")

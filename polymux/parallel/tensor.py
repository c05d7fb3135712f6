"""Tensor parallelism: each rank has a part of every declared layer, and of the heads.

Weights are cut once; what remains per step is one sum over the ranks after each row layer, and one small one for each
norm across heads. All ranks get the same arguments, and all return the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor
from transformers import PreTrainedModel

from polymux.errors import ConfigError
from polymux.families.sharding import TensorPlan
from polymux.parallel.slices import Slice, cut_layers, slices
from polymux.parallel.wrapping import members


def check_tensor(module: torch.nn.Module, plan: TensorPlan, size: int) -> None:
    """Raise ConfigError, with the numbers, if a head count or a width does not divide. Meta tensors will do."""
    for name in plan.counts:
        _check_divides(f"{type(module).__name__} has {name}", _count(module, name), size)
    for path, owner, name in _head_counts(module, plan):
        _check_divides(f"{path} has {name}", owner.__dict__[name], size)
    slices(module, plan, 0, size)


def shard_tensor(module: torch.nn.Module, plan: TensorPlan, group: dist.ProcessGroup, *, sliced: bool = False) -> None:
    """Keep this rank's part of the declared layers, for good. Raises ConfigError, with the module as it was.

    `sliced`: the parameters are this rank's part already, as `slices` of the same plan told their reader. What was
    checked then is not checked again.
    """
    size = group.size()
    layers = list(cut_layers(module, plan))
    if not sliced:
        check_tensor(module, plan, size)
        cut_parameters(module, slices(module, plan, group.rank(), size))
    for path, layer, cut in layers:
        if cut.by == "row":
            layer.register_forward_hook(_Sum(group))
        elif cut.by == "result":
            layer.register_forward_hook(_Share(group.rank(), size))
        elif cut.by == "norm":
            module.set_submodule(path, NormAcrossRanks(layer, group))
        if isinstance(layer, torch.nn.Linear):
            layer.out_features, layer.in_features = layer.weight.shape
    for _, owner, name in _head_counts(module, plan):
        owner.__dict__[name] //= size


def cut_parameters(module: torch.nn.Module, parts: Mapping[str, Slice]) -> None:
    """Have the module hold these parts only; the memory of the whole is free once nobody else holds it."""
    for name, part in parts.items():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        whole = owner.get_parameter(last)
        owner.register_parameter(last, torch.nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad))


def _count(module: torch.nn.Module, name: str) -> object:
    """A number in the config of a model; of one of several parts, in that of its language model."""
    if isinstance(module, PreTrainedModel):
        return module.config.get_text_config().to_dict().get(name)
    return module.config.get(name) if isinstance(module, ModelMixin) else None


def _check_divides(what: str, count: object, size: int) -> None:
    if isinstance(count, int) and count % size:
        raise ConfigError(
            f"tensor parallelism: {what} = {count}, which {size} ranks cannot divide", param="tensor_parallel_size"
        )


def _head_counts(module: torch.nn.Module, plan: TensorPlan) -> list[tuple[str, torch.nn.Module, str]]:
    found = []
    for pattern in plan.heads:
        path, _, name = pattern.rpartition(".")
        found += [(at, owner, name) for at, owner in members(module, path)]
    return found


class _Sum:
    """What the ranks made of their parts of the inputs, added up in place."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        output = output.contiguous()
        dist.all_reduce(output, group=self._group)
        return output


class _Share:
    """Of what every rank computes alike, the part that goes with a rank's heads."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def __call__(self, module: torch.nn.Module, args: object, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return tuple(self(module, args, item) for item in output)
        return output.chunk(self._size, dim=1 if output.ndim == 4 else -1)[self._rank]


class NormAcrossRanks(torch.nn.Module):
    """A root-mean-square norm over channels that are divided: the ranks tell each other their sums of squares."""

    def __init__(self, norm: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self._group = group

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        squares = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=self._group)
        eps = torch.finfo(hidden_states.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(squares / (wide.shape[-1] * self._group.size()) + eps)
        return (normed if self.weight is None else normed * self.weight).type_as(hidden_states)

"""Which part of each parameter a rank has under tensor parallelism; read from a file without the rest of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from polymux.errors import ConfigError
from polymux.families.sharding import Cut, TensorPlan
from polymux.parallel.wrapping import members


class Sliceable(Protocol):
    """A tensor, or what safetensors' `get_slice` gives: of that, no more is read than what is asked for."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True)
class Slice:
    """This rank's part of one parameter: along `dim`, one span for each part that is packed into it."""

    dim: int
    spans: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]  # of the whole parameter
    zero: bool = False  # it is added to a sum over the ranks: the first rank has it, and here it is zero

    def of(self, whole: Sliceable) -> Tensor:
        """Contiguous, and nobody else's memory."""
        before = (slice(None),) * self.dim
        pieces = [whole[(*before, slice(begin, end))] for begin, end in self.spans]
        part = (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )
        return part.zero_() if self.zero else part


def slices(module: torch.nn.Module, plan: TensorPlan, rank: int, size: int) -> dict[str, Slice]:
    """By names of parameters; those not in it are whole on every rank. The module is whole, and may be on meta.

    Raises ConfigError, with the numbers, if something does not divide.
    """
    found: dict[str, Slice] = {}
    for path, layer, cut in cut_layers(module, plan):
        if cut.by == "result":
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            found[f"{path}.{name}"] = _slice(f"{path}.{name}", parameter, layer, cut, (rank, size))
    return found


def cut_layers(module: torch.nn.Module, plan: TensorPlan) -> Iterator[tuple[str, torch.nn.Module, Cut]]:
    """Raises ConfigError if a layer is not of a kind that can be cut, or the plan cuts nothing at all."""
    none = True
    for cut in plan.cuts:
        for path, layer in members(module, cut.layer):
            if cut.by in ("column", "row") and type(layer) is not torch.nn.Linear:
                raise ConfigError(f"tensor parallelism: {path} is a {type(layer).__name__}, not a plain linear layer")
            if cut.by == "norm" and (
                not isinstance(layer, (torch.nn.RMSNorm, RMSNorm)) or dict(layer.named_parameters()).keys() - {"weight"}
            ):
                raise ConfigError(
                    f"tensor parallelism: {path} is a {type(layer).__name__}, not a root-mean-square norm"
                )
            none = False
            yield path, layer, cut
    if none:
        raise ConfigError(f"tensor parallelism: {type(module).__name__} has none of the layers that its plan names")


def _slice(name: str, parameter: Tensor, layer: torch.nn.Module, cut: Cut, ranks: tuple[int, int]) -> Slice:
    rank, size = ranks
    shape = tuple(parameter.shape)
    if cut.by == "row" and parameter.ndim == 1:
        return Slice(0, ((0, shape[0]),), shape, zero=rank > 0)
    dim = 1 if cut.by == "row" else 0
    sizes = _part_sizes(name, shape[dim], layer, cut)
    spans = []
    for begin, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        if (end - begin) % size:
            raise ConfigError(
                f"tensor parallelism: {name} has {end - begin} channels to divide, which {size} ranks cannot",
                param="tensor_parallel_size",
            )
        each = (end - begin) // size
        spans.append((begin + rank * each, begin + (rank + 1) * each))
    return Slice(dim, tuple(spans), shape)


def _part_sizes(name: str, whole: int, layer: torch.nn.Module, cut: Cut) -> list[int]:
    parts = cut.parts or (1,)
    if isinstance(parts, str):
        parts = tuple(getattr(layer, parts))
    unit, over = divmod(whole, sum(parts))
    if over:
        raise ConfigError(f"tensor parallelism: the {whole} channels of {name} are not in proportions {parts}")
    return [part * unit for part in parts]

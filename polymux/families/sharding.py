"""How a model may be divided among ranks, declared: what of its sequence is cut, and which of its layers.

Declared per class of model, since families share their denoisers. Where diffusers has a plan of its own it counts,
unless a family declares another one. Knows neither torch nor diffusers; modules are named by their paths, with one `*`
for each member of a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Split:
    """From here on a rank has its part of a sequence only.

    module: whose argument or output it is; "" is the model itself.
    argument: of its forward; output: or the position in what it returns.
    dim: along which; ndim: only tensors of that many dimensions are split, others are left whole.
    joins: the arguments, split before, whose sequences stand one after the other in this one: each is split for itself.
    """

    module: str
    argument: str | None = None
    output: int | None = None
    dim: int = 1
    ndim: int | None = None
    joins: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gather:
    """From here on all ranks have the whole sequence again: of what this module returns, at a position in it."""

    module: str
    output: int = 0
    dim: int = 1


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """steps: where the sequence is split, and where it is whole again. attention: the layers whose attention sees the
    tokens of all ranks; () for all that go through diffusers' dispatcher."""

    steps: tuple[Split | Gather, ...]
    attention: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A layer of which each rank has a part.

    layer: its path.
    by: "column", its outputs are divided; "row", its inputs are, and the ranks' results are added up; "norm", the
        layer norms what column layers give, across all ranks; "vector", its parameters lie along the divided channels.
    parts: proportions of what is packed into the divided dimension one behind the other, each divided for itself;
        or the name of the layer's attribute that holds them.
    """

    layer: str
    by: Literal["column", "row", "norm", "vector"]
    parts: tuple[int, ...] | str = ()


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """cuts: the divided layers. heads: attributes, by path, that count heads or channels and are divided too."""

    cuts: tuple[Cut, ...]
    heads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is known of these classes of models. None: diffusers' own plan, if it has one."""

    models: tuple[str, ...]
    sequence: SequencePlan | None = None
    tensor: TensorPlan | None = None

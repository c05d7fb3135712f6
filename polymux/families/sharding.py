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
class Lengthen:
    """An argument of the model that may have fewer tokens than there are ranks; it is padded with zeros until each has
    one, and the argument `mask`, of shape (batch, tokens), says so."""

    argument: str
    mask: str


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """steps: where the sequence is split, and where it is whole again.
    attention: the layers whose attention sees all ranks' tokens; () for all that go through diffusers' dispatcher.
    lengthen: what may be too short to split.
    square_masks: masks say for each query and key that both are real; what is made of queries that are not is of no
        account.
    """

    steps: tuple[Split | Gather, ...]
    attention: tuple[str, ...] = ()
    lengthen: tuple[Lengthen, ...] = ()
    square_masks: bool = False


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Layers of which each rank has a part. Those of one plan that a model lacks are passed over.

    layer: their path.
    by: "column", the outputs are divided; "row", the inputs are, and what the ranks make of them is added up; "norm",
        it norms what column layers give, across all ranks; "result", of what it returns a rank takes its part: along
        the heads of (batch, heads, tokens, channels), else along the last dimension.
    parts: proportions of what is packed into the divided dimension one behind the other, each divided for itself;
        or the name of the layer's attribute that holds them.
    """

    layer: str
    by: Literal["column", "row", "norm", "result"]
    parts: tuple[int, ...] | str = ()


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """cuts: the divided layers. heads: attributes that count heads, by path, and are divided too. counts: numbers in
    the model's config that must divide."""

    cuts: tuple[Cut, ...]
    heads: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("num_attention_heads",)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is known of these classes of models. None: diffusers' own plan, if it has one."""

    models: tuple[str, ...]
    sequence: SequencePlan | None = None
    tensor: TensorPlan | None = None


def attention_cuts(path: str, *, norms: bool = False, joint: bool = False) -> tuple[Cut, ...]:
    """Of an attention layer as diffusers names its parts. norms: queries and keys are normed across heads. joint: the
    tokens of a second stream have projections of their own."""
    added = ("add_q_proj", "add_k_proj", "add_v_proj") if joint else ()
    columns = tuple(Cut(layer=f"{path}.{name}", by="column") for name in ("to_q", "to_k", "to_v", *added))
    rows = tuple(Cut(layer=f"{path}.{name}", by="row") for name in ("to_out.0", *(("to_add_out",) if joint else ())))
    normed = ("norm_q", "norm_k") if norms else ()
    return columns + rows + tuple(Cut(layer=f"{path}.{name}", by="norm") for name in normed)


def feed_forward_cuts(path: str, *, gated: bool = False) -> tuple[Cut, ...]:
    """Of a feed-forward layer as diffusers names its parts. gated: what is gated, and the gates, are packed."""
    first = Cut(layer=f"{path}.net.0.proj", by="column", parts=(1, 1) if gated else ())
    return first, Cut(layer=f"{path}.net.2", by="row")


# Of models whose streams of picture and text have the form that diffusers' plans know.
JOINT_STEPS = (
    Split(module="", argument="hidden_states", ndim=3),
    Split(module="", argument="encoder_hidden_states", ndim=3),
    Split(module="", argument="img_ids", dim=0, ndim=2),
    Split(module="", argument="txt_ids", dim=0, ndim=2),
    Gather(module="proj_out"),
)


def block_steps(blocks: str, *arguments: str) -> tuple[Split | Gather, ...]:
    """Where streams are split when the first block begins, and one is whole again behind the last layer."""
    return (*(Split(module=f"{blocks}.0", argument=name) for name in arguments), Gather(module="proj_out"))

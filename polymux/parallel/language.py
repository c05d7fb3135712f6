"""A causal language model of transformers on several ranks: what transformers' own plan says, as plain collectives.

Each rank has some of the heads of every attention layer, some of the channels of every feed-forward layer, and some of
the vocabulary, where that divides: of the head as the plan says, and of the embedding too, which may be the same
tensor. Of fewer key and value heads than ranks, neighbours have the same one. All ranks get the same tokens, and all
return the same logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polymux.errors import ConfigError
from polymux.families.sharding import Cut, TensorPlan
from polymux.parallel.slices import Slice, slices
from polymux.parallel.tensor import shard_tensor

_LAYERS = {"colwise": "column", "rowwise": "row"}
_HEAD = {"colwise_gather_output", "colwise_rep"}  # divided, and whole again for whoever reads its result
_OTHERS = {"replicated_with_grad_allreduce", "embedding_rowwise"}  # whole; and what goes with the head
_KEPT = ("k_proj", "v_proj")  # what makes keys and values


def language_slices(model: Any, rank: int, size: int) -> dict[str, Slice]:
    """Which part of each parameter this rank has; the others are whole on all. The model may be on meta.

    Raises ConfigError, with the numbers, if it cannot be divided among so many.
    """
    _check_heads(model, size)
    plan, groups = _plan(model), min(size, model.config.num_key_value_heads)
    found = slices(model, TensorPlan(cuts=_others(plan)), rank, size)
    found |= slices(model, TensorPlan(cuts=_kept(plan)), rank * groups // size, groups)
    if _divides_vocabulary(model, size):
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            path = next(name for name, module in model.named_modules() if module is layer)
            for name, parameter in layer.named_parameters(recurse=False):
                shape = tuple(parameter.shape)
                each = shape[0] // size
                found[f"{path}.{name}"] = Slice(0, ((rank * each, (rank + 1) * each),), shape)
    return found


def shard_language(model: Any, group: dist.ProcessGroup) -> None:
    """Make one model of the ranks' parts, which are there already."""
    shard_tensor(model, TensorPlan(cuts=_plan(model)), group, sliced=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    whole = model.config.vocab_size
    if embedding.weight.shape[0] < whole:
        model.set_input_embeddings(DividedEmbedding(embedding.weight, group))
    if head.weight.shape[0] < whole:
        head.out_features = head.weight.shape[0]
        head.register_forward_hook(_Gather(group))


class DividedEmbedding(torch.nn.Module):
    """Of its tokens each rank knows some; of the others it makes zeros, and the sum over the ranks is exact."""

    def __init__(self, weight: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = weight
        self.num_embeddings = group.size() * weight.shape[0]
        self._group, self._first = group, group.rank() * weight.shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        places = ids - self._first
        mine = (places >= 0) & (places < self.weight.shape[0])
        made = torch.nn.functional.embedding(places * mine, self.weight) * mine[..., None]
        dist.all_reduce(made, group=self._group)
        return made


class _Gather:
    """The result of a head whose parts are on the ranks, whole on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        size = self._group.size()
        parts = output.new_empty((size * output.shape[0], *output.shape[1:]))
        dist.all_gather_into_tensor(parts, output.contiguous(), group=self._group)
        return parts.view(size, *output.shape).movedim(0, -2).flatten(-2)


def _plan(model: Any) -> tuple[Cut, ...]:
    """The divided layers between embedding and head. Raises ConfigError if nobody says which, or in words unknown."""
    kind, prefix = type(model), model.base_model_prefix
    theirs = {f"{prefix}.{layer}": style for layer, style in (model.config.base_model_tp_plan or {}).items()}
    for layer, style in theirs.items():
        if style not in _LAYERS and style not in _OTHERS:
            raise _refusal(f"{layer}: transformers' style {style!r} is not known here")
    if not theirs:
        raise _refusal(f"nothing says how the layers of {kind.__name__} are divided")
    cuts = [(layer, _LAYERS[style]) for layer, style in theirs.items() if style in _LAYERS]
    return tuple(Cut(layer=layer, by="row" if by == "row" else "column") for layer, by in cuts)


def _kept(plan: tuple[Cut, ...]) -> tuple[Cut, ...]:
    return tuple(cut for cut in plan if cut.layer.endswith(_KEPT))


def _others(plan: tuple[Cut, ...]) -> tuple[Cut, ...]:
    return tuple(cut for cut in plan if not cut.layer.endswith(_KEPT))


def _divides_vocabulary(model: Any, size: int) -> bool:
    style = (type(model)._tp_plan or {}).get("lm_head")
    return style in _HEAD and model.config.vocab_size % size == 0


def _check_heads(model: Any, size: int) -> None:
    config, kind = model.config, type(model).__name__
    heads, kept = config.num_attention_heads, config.num_key_value_heads
    if heads % size:
        raise _refusal(f"{kind} has num_attention_heads = {heads}, which {size} ranks cannot divide")
    if kept % size and size % kept:
        what = f"which {size} ranks can neither divide nor share"
        raise _refusal(f"{kind} has num_key_value_heads = {kept}, {what}")


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"tensor parallelism: {what}", param="tensor_parallel_size")

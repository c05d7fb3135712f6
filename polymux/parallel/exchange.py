"""Collectives over parts of a sequence and of the heads, which need not be equally long.

Tensors are (batch, tokens, heads, channels). Knows neither models nor kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polymux.parallel.groups import Lengths


def shares(count: int, size: int) -> Lengths:
    """How many of so many heads each rank takes."""
    return tuple(count // size + (rank < count % size) for rank in range(size))


def tokens_for_heads(tensors: Sequence[Tensor], lengths: Lengths, group: dist.ProcessGroup) -> list[Tensor]:
    """From this rank's tokens of all heads to all tokens of this rank's heads. All tensors have one shape.

    One exchange for all of them. What comes back are views, with the channels last and contiguous.
    """
    batch, tokens, heads, width = tensors[0].shape
    mine, rows = shares(heads, group.size()), batch * width * len(tensors)
    sent = tensors[0].new_empty(tokens * heads * rows)
    for piece, (begin, end) in zip(torch.split(sent, [tokens * n * rows for n in mine]), _spans(mine), strict=True):
        packed = piece.view(tokens, batch, end - begin, len(tensors) * width).chunk(len(tensors), dim=-1)
        for target, tensor in zip(packed, tensors, strict=True):
            target.copy_(tensor[:, :, begin:end].transpose(0, 1))
    own = mine[group.rank()]
    got = sent.new_empty(sum(lengths) * own * rows)
    _swap(got, sent, [n * own * rows for n in lengths], [tokens * n * rows for n in mine], group)
    whole = got.view(sum(lengths), batch, own, len(tensors) * width).transpose(0, 1)
    return list(whole.chunk(len(tensors), dim=-1))


def heads_for_tokens(tensor: Tensor, heads: int, lengths: Lengths, group: dist.ProcessGroup) -> Tensor:
    """The way back: from all tokens of this rank's heads to this rank's tokens of all `heads`."""
    batch, _, own, width = tensor.shape
    theirs, tokens, rows = shares(heads, group.size()), lengths[group.rank()], batch * width
    sent = tensor.transpose(0, 1).reshape(-1)
    got = sent.new_empty(tokens * heads * rows)
    sizes = [tokens * n * rows for n in theirs]
    _swap(got, sent, sizes, [n * own * rows for n in lengths], group)
    pieces = [p.view(tokens, batch, n, width) for p, n in zip(torch.split(got, sizes), theirs, strict=True)]
    return torch.cat(pieces, dim=2).transpose(0, 1)


def gather(tensor: Tensor, dim: int, lengths: Lengths, group: dist.ProcessGroup) -> Tensor:
    """All parts one after the other, on every rank."""
    first = tensor.movedim(dim, 0).contiguous()
    longest = max(lengths)
    if len(first) < longest:
        first = torch.cat([first, first.new_zeros(longest - len(first), *first.shape[1:])])
    got = first.new_empty(longest * group.size(), *first.shape[1:])
    dist.all_gather_into_tensor(got, first, group=group)
    if min(lengths) < longest:
        got = torch.cat([part[:n] for part, n in zip(torch.split(got, longest), lengths, strict=True)])
    return got.movedim(0, dim)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _swap(got: Tensor, sent: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> None:
    if len({*receive, *send}) == 1:
        dist.all_to_all_single(got, sent, group=group)
    else:
        dist.all_to_all_single(got, sent, receive, send, group=group)

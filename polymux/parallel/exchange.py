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

# Elements of a rank's part of a tensor, up to which several are rather copied into one than sent one by one.
TOGETHER = 2**21


def shares(count: int, size: int) -> Lengths:
    """How many of so many heads each rank takes."""
    return tuple(count // size + (rank < count % size) for rank in range(size))


class Coming:
    """All tokens of this rank's heads, on their way from all ranks."""

    def __init__(self, whole: Tensor, sent: Tensor, work: dist.Work | None) -> None:
        self._whole, self._sent, self._work = whole, sent, work  # what is sent is held until it is there

    def wait(self) -> Tensor:
        """What is computed from now on may use it."""
        if self._work is not None:
            self._work.wait()
        return self._whole


def send_heads(tensor: Tensor, lengths: Lengths, group: dist.ProcessGroup) -> Coming:
    """From this rank's tokens of all heads to all tokens of this rank's heads. Returns at once: while one tensor is on
    its way, the next one is made ready. What comes has its channels last and contiguous."""
    batch, tokens, heads, width = tensor.shape
    mine, row = shares(heads, group.size()), batch * width
    sent = tensor.new_empty(tokens * heads * row)
    for piece, (begin, end) in zip(torch.split(sent, [tokens * n * row for n in mine]), _spans(mine), strict=True):
        piece.view(tokens, batch, end - begin, width).copy_(tensor[:, :, begin:end].transpose(0, 1))
    own = mine[group.rank()]
    got = sent.new_empty(sum(lengths) * own * row)
    work = _swap(got, sent, ([n * own * row for n in lengths], [tokens * n * row for n in mine]), group, wait=False)
    return Coming(got.view(sum(lengths), batch, own, width).transpose(0, 1), sent, work)


def tokens_for_heads(tensors: Sequence[Tensor], lengths: Lengths, group: dist.ProcessGroup) -> list[Tensor]:
    """As `send_heads`, of several tensors that have one shape: one exchange for all of them if they are small, else one
    behind the other."""
    batch, _, heads, width = tensors[0].shape
    if len(tensors) > 1 and max(lengths) * batch * heads * width <= TOGETHER:
        together = send_heads(torch.stack(list(tensors), dim=3).flatten(3), lengths, group).wait()
        return list(together.chunk(len(tensors), dim=-1))
    return [coming.wait() for coming in [send_heads(tensor, lengths, group) for tensor in tensors]]


def heads_for_tokens(tensor: Tensor, heads: int, lengths: Lengths, group: dist.ProcessGroup) -> Tensor:
    """The way back: from all tokens of this rank's heads to this rank's tokens of all `heads`."""
    batch, _, own, width = tensor.shape
    theirs, tokens, rows = shares(heads, group.size()), lengths[group.rank()], batch * width
    sent = tensor.transpose(0, 1).reshape(-1)
    got = sent.new_empty(tokens * heads * rows)
    sizes = [tokens * n * rows for n in theirs]
    _swap(got, sent, (sizes, [n * own * rows for n in lengths]), group, wait=True)
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


def _swap(
    got: Tensor, sent: Tensor, sizes: tuple[list[int], list[int]], group: dist.ProcessGroup, *, wait: bool
) -> dist.Work | None:
    """`sizes`: of what comes from each rank, and of what goes to each; all the same, or said."""
    receive, send = sizes if len({*sizes[0], *sizes[1]}) > 1 else (None, None)
    work: dist.Work | None = dist.all_to_all_single(got, sent, receive, send, group=group, async_op=not wait)
    return work

"""Attention in which the keys and values go round: each rank keeps its queries, and meets one part after the other.

While a part is used, the next one is on its way. Results of parts are put together by the logarithms of their sums,
in fp32. Tensors are (batch, tokens, heads, channels).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from polymux.parallel.groups import Lengths

ALIGN = 16  # elements; GPU kernels want the rows of what is added to scores to begin at a multiple of it
CUDNN = SDPBackend.CUDNN_ATTENTION.value
MASKED = -3e4  # added to a score: its weight is then zero in every type; with minus infinity a part could have no sum


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float | None,
    ring: tuple[Lengths, dist.ProcessGroup],
) -> Tensor:
    """`ring`: how many keys each rank has, and the ranks. `bias`: (batch or 1, heads or 1, queries or 1, all keys)."""
    lengths, group = ring
    rank, size = group.rank(), group.size()
    held = torch.stack([key, value])
    starts = [sum(lengths[:r]) for r in range(size)]
    result: Tensor | None = None
    total = query.new_empty(0)
    for step in range(size):
        at = (rank - step) % size
        coming, works = _pass_on(held, lengths[(at - 1) % size], group) if step < size - 1 else (held, [])
        if lengths[at]:
            part = None if bias is None else bias[..., starts[at] : starts[at] + lengths[at]]
            out, sums = attend(query, held[0], held[1], part, scale)
            result, total = (out.float(), sums) if result is None else _joined(result, total, out, sums)
        for work in works:
            work.wait()
        held = coming
    assert result is not None  # no sequence is empty
    return result.to(query.dtype)


def _joined(a: Tensor, a_sums: Tensor, b: Tensor, b_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of two results over different keys, that over both."""
    share = torch.sigmoid(b_sums - a_sums).transpose(1, 2).unsqueeze(-1)
    return torch.lerp(a, b.float(), share), torch.logaddexp(a_sums, b_sums)


def _pass_on(held: Tensor, coming: int, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Give what is held to the next rank, and take what the one before holds, of so many tokens."""
    rank, size = group.rank(), group.size()
    taken = held.new_empty(2, held.shape[1], coming, *held.shape[3:])
    after = dist.get_global_rank(group, (rank + 1) % size)
    before = dist.get_global_rank(group, (rank - 1) % size)
    ops = []
    if held.numel():
        ops.append(dist.P2POp(dist.isend, held, after, group))
    if taken.numel():
        ops.append(dist.P2POp(dist.irecv, taken, before, group))
    return taken, dist.batch_isend_irecv(ops) if ops else []


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of the sum of weights as (batch, heads, queries) in fp32."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if bias is not None:
        aligned = pad(bias.to(q.dtype), (0, -k.shape[2] % ALIGN))[..., : k.shape[2]]
        bias = aligned.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    ops = torch.ops.aten
    if bias is None and q.device.type == "cuda" and ops._fused_sdp_choice(q, k, v, scale=scale) == CUDNN:
        out, sums = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)[:2]
        sums = sums.reshape(q.shape[:3])  # it has another dimension, of one
    elif q.device.type == "cpu":
        out, sums = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    elif bias is None and q.dtype != torch.float32 and q.shape[-1] % 8 == 0:
        out, sums = ops._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    else:
        out, sums = ops._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)[:2]
    return out.transpose(1, 2), cast(Tensor, sums)[..., : q.shape[2]].float()

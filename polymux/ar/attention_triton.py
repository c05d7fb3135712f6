"""The Triton kernels of `attention`, for one token of each sequence. Imported on machines with a GPU only.

A sequence's keys are divided among `splits` programs, so that few sequences fill the device, too. A second kernel puts
their parts together with the token's own key and value, which it also writes into the cache: the first one reads only
what was there before. Nothing depends on numbers that only the device knows, so a captured graph stays valid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from polymux.ar.paged_cache import Layer, Looks, Steps

TILE = 64  # tokens that a program reads at once
MOST_SPLITS = 32
PROGRAMS = 512  # that fill a large GPU


def decode(looks: Looks, layer: Layer, steps: Steps) -> torch.Tensor:
    """(tokens, heads, channels)"""
    query, key, value = (
        one if one.stride(2) == 1 else one.contiguous() for one in (looks.query, looks.key, looks.value)
    )
    table = layer.table
    tokens, heads, channels = query.shape
    kept, size = layer.keys.shape[2], layer.block_size
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * tokens * kept <= PROGRAMS:
        splits *= 2
    parts = torch.empty(tokens, heads, splits, channels, dtype=torch.float32, device=query.device)
    largest, sums = torch.empty(2, tokens, heads, splits, dtype=torch.float32, device=query.device)
    made = torch.empty(tokens, heads, channels, dtype=query.dtype, device=query.device)
    group, deep = heads // kept, max(16, triton.next_power_of_2(channels))
    sizes = dict(GROUP=group, CHANNELS=channels, DEEP=deep, KEPT=kept, SPLITS=splits, num_warps=4)
    looking[(tokens, kept, splits)](
        query, query.stride(0), query.stride(1), layer.keys, layer.values, table, table.stride(0),
        steps.positions, steps.rows, parts, largest, sums, looks.scaling,
        SIZE=size, TILE=TILE, WIDE=max(16, triton.next_power_of_2(group)), **sizes,
    )  # fmt: skip
    joining[(tokens, heads)](
        query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1), value, value.stride(0),
        value.stride(1), layer.keys, layer.values, steps.slots, parts, largest, sums, made, looks.scaling, **sizes,
    )  # fmt: skip
    return made


# Triton compiles the source: annotations other than its own are errors to it.
@triton.jit  # type: ignore[untyped-decorator]
def looking(  # type: ignore[no-untyped-def]
    query, query_token, query_head, keys, values, table, table_row, positions, rows, parts, largest, sums, scaling,
    SIZE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
    DEEP: tl.constexpr, KEPT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before = tl.load(positions + token)  # tokens that are in the cache
    row = tl.load(rows + token)
    share = tl.cdiv(tl.cdiv(before, SPLITS), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, before)
    group, channel = tl.arange(0, WIDE), tl.arange(0, DEEP)
    mine = (group < GROUP)[:, None] & (channel < CHANNELS)[None, :]
    at = token * query_token + (head * GROUP + group)[:, None] * query_head + channel[None, :]
    q = tl.load(query + at, mask=mine, other=0.0)
    most = tl.full((WIDE,), float("-inf"), tl.float32)
    total = tl.zeros((WIDE,), tl.float32)
    sight = tl.zeros((WIDE, DEEP), tl.float32)
    for first in range(begin, end, TILE):
        position = first + tl.arange(0, TILE)
        there = position < end
        block = tl.load(table + row * table_row + position // SIZE, mask=there, other=0).to(tl.int64)
        slot = block * SIZE + position % SIZE
        place = (slot * KEPT + head)[:, None] * CHANNELS + channel[None, :]
        inside = there[:, None] & (channel < CHANNELS)[None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)
        v = tl.load(values + place, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        score = tl.where(there[None, :], score, float("-inf"))
        now = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - now[:, None])
        fade = tl.exp(most - now)
        total = total * fade + tl.sum(weight, 1)
        sight = sight * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        most = now
    mark = (token * KEPT * GROUP + head * GROUP + group) * SPLITS + split
    tl.store(largest + mark, most, mask=group < GROUP)
    tl.store(sums + mark, total, mask=group < GROUP)
    tl.store(parts + mark[:, None] * CHANNELS + channel[None, :], sight, mask=mine)


@triton.jit  # type: ignore[untyped-decorator]
def joining(  # type: ignore[no-untyped-def]
    query, query_token, query_head, key, key_token, key_head, value, value_token, value_head, keys, values, slots,
    parts, largest, sums, made, scaling,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr, DEEP: tl.constexpr, KEPT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    kept = head // GROUP
    channel, split = tl.arange(0, DEEP), tl.arange(0, SPLITS)
    deep = channel < CHANNELS
    mark = (token * KEPT * GROUP + head) * SPLITS + split
    others = tl.load(largest + mark)
    shares = tl.load(sums + mark)
    sights = tl.load(parts + mark[:, None] * CHANNELS + channel[None, :], mask=deep[None, :], other=0.0)
    q = tl.load(query + token * query_token + head * query_head + channel, mask=deep, other=0.0)
    k = tl.load(key + token * key_token + kept * key_head + channel, mask=deep, other=0.0)
    v = tl.load(value + token * value_token + kept * value_head + channel, mask=deep, other=0.0)
    place = (tl.load(slots + token) * KEPT + kept) * CHANNELS + channel
    first = deep & (head % GROUP == 0)  # of those that share a head of keys, one writes
    tl.store(keys + place, k, mask=first)
    tl.store(values + place, v, mask=first)
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 0) * scaling  # the token sees itself
    most = tl.maximum(own, tl.max(others, 0))
    rise, rise_own = tl.exp(others - most), tl.exp(own - most)
    total = tl.sum(shares * rise, 0) + rise_own
    sight = tl.sum(sights * rise[:, None], 0) + v.to(tl.float32) * rise_own
    out = made + (token * KEPT * GROUP + head) * CHANNELS + channel
    tl.store(out, (sight / total).to(made.dtype.element_ty), mask=deep)

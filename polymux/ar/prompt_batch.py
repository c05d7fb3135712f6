"""Pieces of prompts as one batch: which tokens, where they stand, where they are kept, and who looks at what.

Built on the host and sent to the device once per step, for all layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from polymux.ar.features import Features, Ints, Told, Upload, together
from polymux.ar.paged_cache import Stretch, Stretches, Wholes
from polymux.ar.scheduler import Piece
from polymux.ar.sequence import Sequence

Span = tuple[int, int]  # from a token of the batch to another


@dataclass(frozen=True)
class PromptBatch:
    """`keep`: tokens whose logits are wanted, one for each of `ending`, whose next token comes of this; else any.
    `told`: what stands in the places of some; then `positions` are in three orders."""

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    stretches: Stretches
    ending: list[Sequence]
    told: Told | None


def lay_out(pieces: Many[Piece], block_size: int, upload: Upload) -> PromptBatch:
    """One piece after the other."""
    tokens, positions, slots, keep = [], [], [], []
    ending: list[Sequence] = []
    stretches: list[Stretch] = []
    wholes: dict[int, list[Span]] = defaultdict(list)
    featured: list[tuple[int, Features, int, int]] = []
    begin = 0
    for piece in pieces:
        sequence, end = piece.sequence, begin + piece.end - piece.start
        blocks = np.array(sequence.blocks, dtype=np.int64)
        at = np.arange(piece.start, piece.end)
        tokens.append(np.array(sequence.tokens[piece.start : piece.end], dtype=np.int64))
        positions.append(at if sequence.features is None else sequence.features.stand(piece.start, piece.end))
        slots.append(blocks[at // block_size] * block_size + at % block_size)
        if piece.start == 0:
            wholes[(end - begin - 1).bit_length()].append((begin, end))
        else:
            stretches.append(Stretch(begin, end, piece.end, upload(blocks[: -(-piece.end // block_size)])))
        if sequence.begun:  # its last piece
            keep.append(end - 1)
            ending.append(sequence)
        if sequence.features is not None:
            featured.append((begin, sequence.features, piece.start, piece.end))
        begin = end
    looks = Stretches(
        upload(np.concatenate(slots)),
        tuple(stretches),
        tuple(side_by_side(spans, upload) for spans in wholes.values()),
    )
    return PromptBatch(
        tokens=upload(np.concatenate(tokens)),
        positions=upload(_positions(positions, orders=3 if featured else 1)),
        keep=upload(np.array(keep or [0], dtype=np.int64)),
        stretches=looks,
        ending=ending,
        told=together(featured, begin, upload) if featured else None,
    )


def _positions(parts: Many[Ints], orders: int) -> Ints:
    """(tokens), or (orders, tokens): one that stands in one order stands so in all."""
    if orders == 1:
        return np.concatenate(parts)
    return np.concatenate([np.broadcast_to(part, (orders, part.shape[-1])) for part in parts], axis=1)


def side_by_side(spans: list[Span], upload: Upload) -> Wholes:
    longest = max(end - begin for begin, end in spans)
    index = np.stack([np.minimum(np.arange(begin, begin + longest), end - 1) for begin, end in spans])
    tokens = np.concatenate([np.arange(begin, end) for begin, end in spans])
    places = np.concatenate([i * longest + np.arange(end - begin) for i, (begin, end) in enumerate(spans)])
    return Wholes(upload(index), upload(tokens), upload(places))

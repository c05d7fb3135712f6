"""What stands in a prompt beside words: pictures, sounds and films, as features in the places of some of its tokens.

A network whose tokens stand in three orders at once (frame, row, column) is told their positions with them. All of it
is kept on the host, and goes to the device in the pieces in which a prompt is computed, as often as that happens.
Knows neither media nor what has made the features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Upload = Callable[[Ints], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """Features (layers, places, size) for the tokens at `places`, which ascend."""

    places: Ints
    values: torch.Tensor

    def between(self, start: int, end: int) -> Rows:
        """Of the tokens `start` to `end`, counted from there."""
        first, last = np.searchsorted(self.places, (start, end)).tolist()
        return Rows(self.places[first:last] - start, self.values[:, first:last])


@dataclass(frozen=True, eq=False)
class Features:
    """Of a prompt. `inputs`, one layer: what its tokens are in place of their embeddings. `deeper`: what is added to
    the outputs of the first layers, where the network does that. `positions`: (3, tokens of the prompt); a token after
    the prompt stands, in all three orders, `shift` after its number."""

    inputs: Rows
    deeper: Rows | None
    positions: Ints
    shift: int

    def stand(self, start: int, end: int) -> Ints:
        """(3, tokens): where the tokens `start` to `end` stand."""
        known = self.positions[:, start:end]
        after = np.arange(max(start, self.positions.shape[1]), end) + self.shift
        return np.concatenate([known, np.broadcast_to(after, (3, len(after)))], axis=1)


@dataclass(frozen=True, eq=False)
class Told:
    """The features of a batch, on the device: for the tokens at `at`; `deep_at` (tokens of the batch) says at which."""

    at: torch.Tensor
    inputs: torch.Tensor
    deep_at: torch.Tensor | None
    deeper: tuple[torch.Tensor, ...]


def together(parts: Many[tuple[int, Features, int, int]], size: int, upload: Upload) -> Told | None:
    """Of pieces of prompts that make a batch of `size` tokens: each begins at that token of the batch, and is those
    from one number to another of its sequence. None: they are all words."""
    inputs: list[Rows] = []
    deeper: list[Rows] = []
    for begin, features, start, end in parts:
        for found, rows in ((inputs, features.inputs), (deeper, features.deeper)):
            if rows is not None and len((part := rows.between(start, end)).places):
                found.append(Rows(part.places + begin, part.values))
    if not inputs:
        return None
    at, values = _joined(inputs, upload)
    if not deeper:
        return Told(at, values[0], None, ())
    deep_places, deep_values = _joined(deeper, upload)
    mask = torch.zeros(size, dtype=torch.bool, device=deep_places.device)
    mask[deep_places] = True
    return Told(at, values[0], mask, deep_values.unbind(0))


def _joined(rows: Many[Rows], upload: Upload) -> tuple[torch.Tensor, torch.Tensor]:
    at = upload(np.concatenate([one.places for one in rows]))
    values = torch.cat([one.values for one in rows], dim=1)
    return at, values.pin_memory().to(at.device, non_blocking=True) if at.is_cuda else values


def names_of(tokens: Many[int], features: Features, contents: Mapping[int, Many[bytes]]) -> list[int] | None:
    """The tokens of a prompt as they are told apart from those of others: where a medium stands, by what it holds and
    where it stands; numbers below zero. `contents`: what media hold, by the token that stands for one of their kind.

    None: a token's name would not say all of it. A word stands right behind all that is before it, or its position is
    more than what was before it says."""
    places, positions = features.inputs.places, features.positions
    reach = np.maximum.accumulate(positions.max(axis=0))
    behind = np.concatenate([[0], reach + 1])
    words = np.ones(len(tokens), dtype=bool)
    words[places] = False
    if (positions != behind[:-1])[:, words].any() or behind[-1] != len(tokens) + features.shift:
        return None
    names = list(tokens)
    for token, held in contents.items():
        runs = _runs([place for place in places.tolist() if tokens[place] == token])
        if len(runs) != len(held):  # they stand in parts: each is known by all of them
            held = [b"".join(held)] * len(runs)
        for run, content in zip(runs, held, strict=True):
            for place in run:
                key = content + positions[:, place].tobytes()
                digest = hashlib.blake2b(key, digest_size=8, person=b"medium").digest()
                names[place] = -1 - (int.from_bytes(digest, "little") >> 1)
    return None if any(names[place] >= 0 for place in places.tolist()) else names


def _runs(places: Many[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs

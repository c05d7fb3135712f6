"""What the ranks of a model that answers are told: the next step, in numbers. Complete in itself: they keep no plan.

Imported by processes before they import torch.
"""

from __future__ import annotations

import msgspec


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a prompt: from `start` to the end of these tokens, which are in these blocks."""

    row: int
    start: int
    tokens: list[int]
    blocks: list[int]
    chooses: bool  # the next token comes of it


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Sequences that go on by the token that their rows have, from `positions`, kept in `slots`; and pieces."""

    rows: list[int]
    positions: list[int]
    slots: list[int]
    pieces: list[Begun]


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Do what takes long, with rank 0, before anybody waits for it."""

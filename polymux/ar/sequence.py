"""A sequence of tokens that is to go on, and how its next ones are drawn."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from polymux.ar.features import Features


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are chosen. Temperature 0: the likeliest. A top_k of 0, a top_p or a penalty of 1: none."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens of the prompt or the answer
    frequency_penalty: float = 0.0  # of tokens of the answer, by how often
    presence_penalty: float = 0.0  # of tokens of the answer, once
    seed: int = 0

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty) or bool(self.presence_penalty)


class Uniforms:
    """Numbers from 0 to 1, one for each token that is drawn: a sequence's own, whoever stands beside it."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.Generator(np.random.Philox(key=seed))
        self._drawn: list[float] = []

    def next(self) -> float:
        if not self._drawn:
            self._drawn = self._source.random(64).tolist()[::-1]
        return self._drawn.pop()


class Constraint(Protocol):
    """What the new tokens of one sequence must fit."""

    def allowed(self, written: Many[int]) -> torch.Tensor:
        """(vocabulary,) of bool, on the CPU: true where a token may follow these."""


class Heard:
    """The states of a sequence's tokens, as they come, on the host. What is computed again takes its own place."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, torch.Tensor]] = []

    def take(self, start: int, rows: torch.Tensor) -> None:
        """(tokens, size), of tokens from `start` on."""
        self._rows.append((start, rows))

    def states(self, count: int) -> torch.Tensor:
        """(count, size), of the first tokens."""
        made = self._rows[0][1].new_empty(count, self._rows[0][1].shape[1])
        for start, rows in self._rows:
            made[start : start + len(rows)] = rows[: max(0, count - start)]
        return made


@dataclass(eq=False, kw_only=True)
class Sequence:
    """`tokens` are those that are known; `computed` of them are in the cache, or in a step that is under way, and
    `pending` more are being chosen there."""

    name: Hashable
    tokens: list[int]
    limit: int  # the most new tokens
    ends: frozenset[int] = frozenset()  # tokens after which it does not go on
    drawing: Drawing = field(default_factory=Drawing)
    constraint: Constraint | None = None
    features: Features | None = None  # of its prompt, where that is more than words
    names: list[int] | None = None  # of its tokens, by which others find what was computed of them; None: themselves
    shared: bool = True  # whether others may find it
    heard: Heard | None = None  # where its states go, if somebody listens to them
    prompt: int = field(init=False)
    computed: int = 0
    pending: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of full blocks whose tokens are known
    remembered: int = 0  # blocks of its own that others can find
    row: int | None = None  # its place on the device
    begun: bool = False  # its next token is being chosen there, or was
    ended: bool = False
    uniforms: Uniforms = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.uniforms = Uniforms(self.drawing.seed)

    @property
    def length(self) -> int:
        """With the tokens that are being chosen."""
        return len(self.tokens) + self.pending

    @property
    def written(self) -> int:
        """New tokens, with those that are being chosen."""
        return self.length - self.prompt

    @property
    def decodes(self) -> bool:
        """Whether it goes on where it is, and all is computed but its last token. With a constraint it does not before
        that one is known: it says which may follow."""
        return self.begun and self.computed == self.length - 1 and not (self.constraint and self.pending)

    @property
    def shift(self) -> int:
        """How far behind its number a new token stands."""
        return 0 if self.features is None else self.features.shift

    def leave(self) -> list[int]:
        """It is nowhere any more, and had these blocks."""
        blocks, self.blocks = self.blocks, []
        self.row, self.computed, self.remembered, self.begun = None, 0, 0, False
        return blocks

    def take(self, token: int) -> None:
        """The first of the tokens that are being chosen is this one."""
        self.pending -= 1
        self.tokens.append(token)
        if self.names is not None:
            self.names.append(token)
        self.ended = self.ended or token in self.ends or len(self.tokens) - self.prompt >= self.limit

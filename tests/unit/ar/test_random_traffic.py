"""Random requests come, share beginnings, give way and leave: whoever looks at a block finds what it has written."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Many

import pytest
import torch

from polymux.ar.blocks import TRASH, BlockPool
from polymux.ar.scheduler import Plan, Scheduler
from polymux.ar.sequence import Sequence

SIZE, ROWS = 4, 5


class Free:
    def allowed(self, written: Many[int]) -> torch.Tensor:
        return torch.ones(7, dtype=torch.bool)


class Device:
    """In place of a network: what is kept of a token is the whole beginning up to it, of which the next one follows."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.kept: dict[int, tuple[int, ...]] = {}  # by slot
        self.last: dict[int, tuple[int, ...]] = {}  # by row: all tokens, with the one that was chosen last

    def launch(self, plan: Plan) -> list[tuple[Sequence, int]]:
        users = Counter(block for one in self.scheduler.running for block in {*one.blocks})
        assert TRASH not in users and len(users) == self.scheduler.pool.used
        chosen = []
        for one in plan.decodes:
            assert one.row is not None
            assert one.constraint is None or one.pending == 1, "what comes before the token that is chosen is known"
            chosen.append((one, self.compute(one, self.last[one.row], one.computed - 1)))
        for piece in plan.pieces:
            tokens = tuple(piece.sequence.tokens)
            token = self.compute(piece.sequence, tokens[: piece.end], piece.start)
            if piece.sequence.begun:
                chosen.append((piece.sequence, token))
        return chosen

    def compute(self, one: Sequence, tokens: tuple[int, ...], start: int) -> int:
        """Tokens from `start` on; all before must be there."""
        slots = [one.blocks[at // SIZE] * SIZE + at % SIZE for at in range(len(tokens))]
        assert [self.kept[slot] for slot in slots[:start]] == [tokens[: at + 1] for at in range(start)]
        for at in range(start, len(tokens)):
            self.kept[slots[at]] = tokens[: at + 1]
        token = follows(tokens)
        assert one.row is not None
        self.last[one.row] = (*tokens, token)
        return token


def follows(tokens: tuple[int, ...]) -> int:
    return hash(tokens) % 7


@pytest.mark.parametrize("seed", range(12))
def test_nobody_finds_what_is_another_s(seed: int) -> None:
    source = random.Random(seed)
    pool = BlockPool(source.choice([12, 20, 60]), SIZE, caching=source.random() < 0.8)
    made = Scheduler(pool, ROWS, source.choice([3, 8, 30]), chunked=source.random() < 0.7)
    device, ahead = Device(made), source.random() < 0.6
    before: list[tuple[Sequence, int]] = []

    open_ones: list[Sequence] = []
    ended = aborted = 0
    for step in range(5000):
        if step < 300 and source.random() < 0.3:
            beginning = [1] * source.randrange(12) + [source.randrange(3)]
            one = Sequence(name=step, tokens=beginning + [2] * source.randrange(8), limit=source.randrange(1, 20),
                           ends=frozenset({6}), constraint=source.choice([None, None, Free()]))  # fmt: skip
            open_ones.append(one)
            made.add(one)
        if open_ones and source.random() < 0.05:
            one = open_ones.pop(source.randrange(len(open_ones)))
            made.remove(one)
            aborted += 1
        launched = device.launch(made.plan())
        landing, before = (before, launched) if ahead else (launched, [])
        for one, token in landing:
            if one.ended:
                continue
            one.take(token)
            made.know(one)
            if one.ended:
                made.remove(one)
                open_ones.remove(one)
                ended += 1
                answer = one.tokens[one.prompt :]
                assert all(follows(tuple(one.tokens[: one.prompt + i])) == t for i, t in enumerate(answer))
                assert answer[-1] == 6 or len(answer) == one.limit
        if step >= 300 and not open_ones:
            break
    assert not open_ones and pool.used == 0 and not made.waiting and not made.running
    assert ended > 20 and aborted > 0 and sorted(made._rows) == list(range(ROWS))

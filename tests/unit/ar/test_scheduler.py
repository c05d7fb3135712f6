"""Who is in a step, and who has which blocks, without any network."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from polymux.ar.blocks import TRASH, BlockPool
from polymux.ar.scheduler import Plan, Scheduler
from polymux.ar.sequence import Heard, Sequence

SIZE = 4


def scheduler(
    blocks: int = 100, rows: int = 8, budget: int = 16, chunked: bool = True, caching: bool = True
) -> Scheduler:
    return Scheduler(BlockPool(blocks, SIZE, caching), rows, budget, chunked)


def sequence(name: str, prompt: int, limit: int = 3, base: int = 0) -> Sequence:
    return Sequence(name=name, tokens=list(range(base, base + prompt)), limit=limit)


def land(made: Scheduler, plan: Plan) -> None:
    """Every token that was being chosen is its own place."""
    for one in [*plan.decodes, *(piece.sequence for piece in plan.pieces)]:
        if one.pending and not one.ended:
            one.take(len(one.tokens))
            made.know(one)
            if one.ended:
                made.remove(one)


def shape(plan: Plan) -> tuple[list[Any], list[Any]]:
    return [s.name for s in plan.decodes], [(p.sequence.name, p.start, p.end) for p in plan.pieces]


def owned(made: Scheduler) -> Counter[int]:
    return Counter(block for one in made.running for block in one.blocks)


def test_prompts_share_what_is_left_of_the_budget() -> None:
    made = scheduler()
    for one in (sequence("a", 10), sequence("b", 20, base=50)):
        made.add(one)
    seen = []
    while plan := made.plan():
        seen.append(shape(plan))
        land(made, plan)
    assert seen == [
        ([], [("a", 0, 10), ("b", 0, 6)]),
        (["a"], [("b", 6, 20)]),
        (["a", "b"], []),
        (["b"], []),
    ]
    assert made.pool.used == 0 and not made.running


def test_without_parts_a_prompt_waits_until_it_fits_or_is_alone() -> None:
    made = scheduler(chunked=False)
    for one in (sequence("a", 10), sequence("b", 12, base=50), sequence("c", 40, base=90)):
        made.add(one)
    plans = []
    while plan := made.plan():
        plans.append(shape(plan)[1])
        land(made, plan)
    assert [p for p in plans if p] == [[("a", 0, 10)], [("b", 0, 12)], [("c", 0, 40)]]


def test_rows_limit_who_runs() -> None:
    made = scheduler(rows=2)
    for name in "abc":
        made.add(sequence(name, 2))
    assert [name for name, *_ in shape(made.plan())[1]] == ["a", "b"]
    assert [s.name for s in made.waiting] == ["c"]


def test_a_common_beginning_is_computed_once() -> None:
    made = scheduler()
    first = sequence("a", 10, limit=4)
    made.add(first)
    while plan := made.plan():
        land(made, plan)
    again, longer, other = sequence("b", 10), sequence("c", 13), sequence("d", 10, base=1)
    for one in (again, longer, other):
        made.add(one)
    assert shape(made.plan())[1] == [("b", 8, 10), ("c", 12, 13), ("d", 0, 10)]  # the answer's tokens count, too
    assert again.blocks[:2] == longer.blocks[:2] and not {*again.blocks} & {*other.blocks}
    assert (made.looked_for, made.found) == (2 + 2 + 3 + 2, 5)
    whole = sequence("e", 8)
    made.add(whole)
    assert shape(made.plan())[1] == [("e", 4, 8)]  # of the last block its last token is needed
    made.forget()
    made.add(sequence("f", 10))
    assert shape(made.plan())[1][-1] == ("f", 0, 10)


def test_what_is_known_by_names_is_found_by_them() -> None:
    """Not by its tokens; one that is listened to finds nothing, and is found; one that is not shared is neither."""

    def found(**how: Any) -> int:
        before, one = made.found, Sequence(name="a", tokens=[7] * 12, limit=2, **how)
        made.add(one)
        while plan := made.plan():
            land(made, plan)
        return made.found - before

    made = scheduler()
    assert found(shared=False) == found(shared=False) == 0
    assert found(heard=Heard()) == 0 and found() == 2 and found(heard=Heard()) == 0
    picture, other = [7, 7, -5, -5, *[7] * 8], [7, 7, -6, -6, *[7] * 8]
    assert found(names=list(picture)) == 0 and found(names=list(other)) == 0
    assert found(names=list(picture)) == 2 and found(names=[*other[:8], 8, 8, 8, 8]) == 2


def test_blocks_that_are_needed_are_the_oldest_that_nobody_has() -> None:
    pool = BlockPool(3, SIZE, caching=True)
    blocks = [pool.take() for _ in range(3)]
    assert TRASH not in blocks and pool.free == 0
    keys = []
    for block in blocks[:2]:
        keys.append(pool.next_key(keys[-1] if keys else None, [block] * SIZE))
        pool.remember(block, keys[-1])
    pool.give_back(blocks)
    assert pool.take() == blocks[2]  # it holds nothing that could be found
    assert pool.find(keys) == blocks[:2]
    pool.give_back(blocks[:2])
    assert pool.take() == blocks[1] and pool.find(keys) == blocks[:1]


def test_who_came_last_gives_way_and_comes_back() -> None:
    made = scheduler(blocks=5, caching=False)
    one, two = sequence("a", 6, limit=8), sequence("b", 7, limit=8, base=50)
    made.add(one)
    made.add(two)
    left = 0
    for _ in range(40):
        plan = made.plan()
        assert all(count == 1 for count in owned(made).values())
        if two.row is None and not two.ended:
            left += 1
            assert made.waiting[0] is two and not two.blocks and two.computed == 0
        land(made, plan)
    assert left and made.preemptions == 1 and one.ended and two.ended
    assert one.tokens[6:] == list(range(6, 14)) and two.tokens[7:] == list(range(7, 15))
    assert made.pool.used == 0


@pytest.mark.parametrize("moment", range(6))
def test_whoever_is_removed_leaves_nothing(moment: int) -> None:
    made = scheduler(budget=4, rows=2)
    all_of_them = [sequence("a", 9, base=0), sequence("b", 3, base=30), sequence("c", 3, base=60)]
    for one in all_of_them:
        made.add(one)
    for _ in range(moment):
        land(made, made.plan())
    for one in all_of_them:
        if not one.ended:
            made.remove(one)
    assert not made.plan() and made.pool.used == 0 and not made.running and not made.waiting


def test_the_next_step_can_be_planned_before_the_tokens_are_known() -> None:
    made = scheduler()
    one = sequence("a", 5, limit=3)
    made.add(one)
    plans = [made.plan() for _ in range(5)]
    assert [shape(plan) for plan in plans] == [([], [("a", 0, 5)]), (["a"], []), (["a"], []), ([], []), ([], [])]
    assert (one.pending, one.computed) == (3, 7)
    for plan in plans[:3]:
        land(made, plan)
    assert one.ended and one.tokens[5:] == [5, 6, 7]

"""Two ranks that divide calls: the same results and errors on both, whatever happens on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_runner import CPU, calls_of, numbers

from polymux.diffusion import guidance_split
from polymux.diffusion.call import Call
from polymux.diffusion.guidance_split import Circles, GuidanceSplit
from polymux.diffusion.merging import Merger
from polymux.diffusion.runner import Runner
from polymux.errors import PolymuxError, StageDeadError

SIZE = 2
Forward = Callable[[torch.Tensor], Any]


class Table:
    """Where ranks in threads tell each other things."""

    def __init__(self) -> None:
        self.barrier, self.told = threading.Barrier(SIZE, timeout=5), [None] * SIZE


class Circle:
    """Takes the place of `parallel.sharing.Sharing`."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.size = table, rank, SIZE

    def tell(self, note: Any) -> list[Any]:
        self.table.told[self.rank] = note
        self.table.barrier.wait()
        told = list(self.table.told)
        self.table.barrier.wait()
        return told

    def share(self, mine: Sequence[Any]) -> list[list[Any]]:
        return self.tell(list(mine))


class OneAtATime(Runner):
    """The default random generators are the process's: here, that of all ranks."""

    lock = threading.Lock()

    def _run(self, calls: Sequence[Call], arguments: dict[str, Any]) -> Any:
        with self.lock:
            return super()._run(calls, arguments)


class Rank:
    """A rank with calls of its own, one for each value, which are the same on all."""

    def __init__(self, table: Table, rank: int, forward: Forward, values: Sequence[float], *, tied: bool) -> None:
        self.calls, self.module = calls_of(forward, *values)
        circle: Any = Circle(table, rank)
        circles = Circles(circle, circle, lambda call, dividing: circle if tied else None)
        self.split = GuidanceSplit(OneAtATime(Merger(), CPU), circles, lambda call: True, self.give_up)
        self.ended: list[PolymuxError] = []

    def give_up(self, error: PolymuxError) -> None:
        self.ended.append(error)
        raise error

    def run(self, *, apart: bool = False) -> list[Any]:
        for place, call in enumerate(self.calls):
            call.lane = place if apart else 0
        self.split.execute(self.calls)
        return numbers(self.calls)


def ranks(*forwards: Forward, values: Sequence[float] = (1, 2), tied: bool = False) -> list[Rank]:
    table = Table()
    every = forwards if len(forwards) == SIZE else forwards * SIZE
    return [Rank(table, rank, forward, values, tied=tied) for rank, forward in enumerate(every)]


class Alone:
    rank, size = 0, 1


def undivided(made: list[Rank]) -> list[Rank]:
    """All run everything, together."""
    for rank in made:
        circles = rank.split.circles
        rank.split.circles = Circles(Alone(), circles.everyone, circles.tied)  # type: ignore[arg-type]
    return made


def both(made: list[Rank], **how: bool) -> list[Any]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: rank.run(**how), made))


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("no room")


def drawing(x: torch.Tensor) -> torch.Tensor:
    return x + 0 * torch.rand(1)


def fails_at_two(x: torch.Tensor) -> torch.Tensor:
    if bool((x == 2).any()):
        raise RuntimeError("two")
    return x + 1


def without_samples(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


@pytest.mark.parametrize("apart", [False, True])
def test_each_runs_a_part_and_has_all_results(apart: bool) -> None:
    made = ranks(plus_one)
    assert both(made, apart=apart) == [[2, 3], [2, 3]]
    assert [rank.module.batches for rank in made] == [[1], [1]]
    assert all(call.owner.seconds for rank in made for call in rank.calls)  # type: ignore[attr-defined]
    assert [rank.split.divided for rank in made] == [1, 1]


def test_more_samples_than_ranks() -> None:
    made = ranks(plus_one, values=(1, 2, 3))
    assert both(made) == [[2, 3, 4], [2, 3, 4]]
    assert [rank.module.batches for rank in made] == [[1], [2]]


@pytest.mark.parametrize("apart", [False, True])
def test_an_error_of_one_call_is_that_call_s_on_all_ranks(apart: bool) -> None:
    made = ranks(fails_at_two)
    assert both(made, apart=apart) == [[2, "RuntimeError"]] * 2
    assert not any(rank.split.undivided for rank in made)  # the calls were at fault, not the dividing


@pytest.mark.parametrize("apart", [False, True])
def test_what_fails_on_one_rank_alone_fails_on_all(apart: bool) -> None:
    made = ranks(plus_one, out_of_memory)
    assert both(made, apart=apart) == [["OutOfMemoryError"] * 2] * 2
    assert not any(rank.split.undivided for rank in made)


@pytest.mark.parametrize("forward", [drawing, without_samples])
def test_what_cannot_be_divided_is_not_from_then_on(forward: Forward) -> None:
    made = ranks(forward, values=(1,))
    for rank in made:
        rank.calls[0].arguments["x"] = torch.ones(2, 2)  # one call with two samples
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(lambda rank: rank.split.execute(rank.calls), made))
    assert all(call.error is None for rank in made for call in rank.calls)
    assert [rank.split.undivided for rank in made] == [{"transformer"}] * 2
    assert [rank.split.parts(rank.calls) for rank in made] == [1, 1]


def test_arguments_that_were_changed_fail_without_a_run() -> None:
    made = ranks(plus_one)
    for rank in made:
        for call in rank.calls:
            call.keep_arguments()
            call.arguments["x"].add_(1)
    assert both(made) == [["GenerationError"] * 2] * 2


def test_ranks_that_work_on_one_call_fail_together() -> None:
    made = undivided(ranks(fails_at_two, tied=True))
    assert both(made) == [[2, "RuntimeError"]] * 2
    assert not any(rank.ended for rank in made)


def test_a_rank_that_fails_alone_where_others_work_on_the_same_call_ends_them_all() -> None:
    made = undivided(ranks(plus_one, out_of_memory, tied=True))
    both(made)
    assert all(isinstance(rank.ended[0], StageDeadError) for rank in made)
    assert "on some ranks and not on others" in made[0].ended[0].message


def test_a_rank_whose_part_cannot_be_made_tells_those_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ranks(plus_one, tied=True)

    def rows(*_: object) -> dict[str, Any]:
        raise RuntimeError("no such part")

    monkeypatch.setattr(made[0].split.runner.merger, "rows", rows)
    for rank in made:
        rank.split.give_up = rank.ended.append
    both(made)
    assert all(isinstance(rank.ended[0], StageDeadError) for rank in made)


def test_a_rank_that_fails_while_the_others_wait_for_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance_split, "PATIENCE_S", 0.05)
    rank, _ = undivided(ranks(out_of_memory, tied=True))
    ended = threading.Event()
    rank.split.give_up = lambda error: ended.set()
    waiting = threading.Thread(target=rank.split.execute, args=[rank.calls], daemon=True)
    waiting.start()  # the other one never comes
    assert ended.wait(5)

"""What concerns a language model on several ranks as a whole: on all of them, or the end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from polymux.engine import ar_executor
from polymux.engine.ar_executor import ArExecutor
from polymux.engine.rank_messages import Answer
from polymux.errors import NotReadyError, OutOfMemoryError
from polymux.messages import Sleep, WakeUp

FULL = OutOfMemoryError("there is no room")


class Engine:
    """Rank 0's. What is to be raised is raised."""

    def __init__(self, problem: Exception | None = None, busy: bool = False) -> None:
        self.problem, self.busy = problem, busy

    def check_idle(self) -> None:
        if self.busy:
            raise NotReadyError("the engine is busy")

    def sleep(self, level: int) -> int:
        return level if self._works() else 0

    def wake_up(self) -> None:
        self._works()

    def step(self) -> list[Any]:
        self._works()
        return []

    def _works(self) -> bool:
        if self.problem is not None:
            raise self.problem
        return True


class Others:
    def __init__(self, *problems: OutOfMemoryError | None) -> None:
        self.told: list[Any] = []
        self._answers = [Answer(10, None if problem is None else problem.info()) for problem in problems]

    def tell(self, message: Any) -> None:
        self.told.append(message)

    def answers(self) -> list[Answer]:
        return self._answers


def executor(engine: Engine, others: Others) -> ArExecutor:
    return ArExecutor(cast(Any, engine), cast(Any, others))


def test_all_sleep_and_wake() -> None:
    others = Others(None, None)
    one = executor(Engine(), others)
    assert one.sleep(2) == 22
    one.wake_up()
    assert others.told == [Sleep(2), WakeUp()]


def test_what_fails_everywhere_is_raised() -> None:
    with pytest.raises(OutOfMemoryError, match="there is no room"):
        executor(Engine(FULL), Others(FULL, FULL)).wake_up()


@pytest.mark.parametrize(("here", "there"), [(None, (FULL, None)), (None, (FULL, FULL)), (FULL, (None, None))])
def test_what_fails_somewhere_is_the_end(here: Exception | None, there: tuple[OutOfMemoryError | None, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"some of the ranks could not .*there is no room"):
        executor(Engine(here), Others(*there)).wake_up()


def test_a_busy_engine_is_not_put_to_sleep_anywhere() -> None:
    others = Others(None)
    with pytest.raises(NotReadyError, match="busy"):
        executor(Engine(busy=True), others).sleep(1)
    assert not others.told


def test_a_step_that_fails_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ar_executor, "LOSS_S", 0.0)
    with pytest.raises(ValueError, match="a kernel"):
        executor(Engine(ValueError("a kernel")), Others(None)).step()

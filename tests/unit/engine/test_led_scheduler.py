"""Rank 0 names the calls that run together, and the others find them by their names."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.led_scheduler import FollowScheduler, LeadScheduler
from polymux.engine.rank_messages import Round
from polymux.engine.seeds import with_seed
from polymux.errors import StageDeadError
from polymux.request import OmniDiffusionSamplingParams, Request

DENOISER, ENCODER = (Component(role, torch.nn.Identity(), role) for role in ("denoiser", "encoder"))


class Line:
    """To another rank, in this process."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def tell(self, message: Any) -> None:
        self._messages.put(message)

    def receive(self) -> Any:
        return self._messages.get(timeout=1)


def owner(name: str) -> CallOwner:
    made = CallOwner()
    made.request_id, made.index = name, 0
    return made


def call(made_by: CallOwner, number: int, component: Component = DENOISER) -> Call:
    return Call(made_by, component, "forward", {}, TorchState.now("cpu"), number=number)


def lead(line: Line, places: int, samples: int = 1) -> LeadScheduler:
    inner = StepScheduler(100, lambda call: False, lambda call: 0, lambda call: 1)
    return LeadScheduler(inner, line, places, lambda group: samples)  # type: ignore[arg-type]


def names(calls: list[Call]) -> list[tuple[str, int, int]]:
    return [(call.owner.request_id, call.number, call.lane) for call in calls]


def test_both_run_the_same() -> None:
    line = Line()
    first, other = lead(line, 2), FollowScheduler(line)  # type: ignore[arg-type]
    first.telling = True
    for scheduler, order in ((first, "ab"), (other, "ba")):
        for name in order:
            made_by = owner(name)
            scheduler.submit([call(made_by, 1), call(made_by, 2)])
    for _ in range(2):
        assert names(first.next_group()) == names(other.next_group())
    assert first.next_group() == other.next_group() == []


def test_guidance_calls_that_do_not_merge_run_beside_each_other() -> None:
    scheduler, made_by = lead(Line(), 2), owner("a")
    scheduler.submit([call(made_by, 1), call(made_by, 2), call(made_by, 3)])
    assert names(scheduler.next_group()) == [("a", 1, 0), ("a", 2, 1)]
    assert names(scheduler.next_group()) == [("a", 3, 0)]


def test_a_group_that_can_be_cut_and_an_encoder_run_by_themselves() -> None:
    made_by = owner("a")
    scheduler = lead(Line(), 2, samples=2)
    scheduler.submit([call(made_by, 1), call(made_by, 2)])
    assert len(scheduler.next_group()) == 1
    scheduler = lead(Line(), 2)
    scheduler.submit([call(made_by, 1, ENCODER), call(made_by, 2, ENCODER)])
    assert len(scheduler.next_group()) == 1


def test_ranks_that_have_come_apart_end() -> None:
    line = Line()
    other = FollowScheduler(line)  # type: ignore[arg-type]
    made_by = owner("a")
    other.submit([call(made_by, 1)])
    other.forget(made_by)
    line.tell(Round([[("a", "outputs", 0, 1)]]))
    with pytest.raises(StageDeadError, match="come apart"):
        other.next_group()


def test_seeds_are_drawn_once() -> None:
    request = Request(request_id="a")
    one, two = with_seed(request), with_seed(request)
    assert one.params.seed is not None and one.params.seed != two.params.seed
    assert with_seed(one) is one
    given = Request(request_id="a", params=OmniDiffusionSamplingParams(seed=0))
    assert with_seed(given) is given

"""Calls whose component is on the device go first: fewer moves, and still nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from polymux.diffusion.call import Call, CallOwner
from polymux.diffusion.step_scheduler import PATIENCE, StepScheduler
from polymux.diffusion.tuned import AdapterSet

STEPS = 12


@dataclass
class FakeComponent:
    name: str


ENCODER, DENOISER = FakeComponent("encoder"), FakeComponent("denoiser")


@dataclass(eq=False)
class FakeCall:
    owner: Requester
    component: FakeComponent
    method: str = "forward"
    adapters: AdapterSet = ()
    order: int = 0


class Requester(CallOwner):
    """Calls the encoder, then the denoiser so many times."""

    def __init__(self, steps: int = STEPS) -> None:
        self.left = [ENCODER] + [DENOISER] * steps

    def next_call(self) -> list[Any]:
        return [FakeCall(self, self.left.pop(0))] if self.left else []


@dataclass
class Device:
    """Has one component at a time."""

    resident: FakeComponent | None = None
    moves: int = 0
    turns: int = 0
    waited: list[int] = field(default_factory=list)

    def ready(self, call: Call) -> bool:
        return cast(Any, call).component is self.resident

    def drive(self, scheduler: StepScheduler, arrivals: dict[int, Requester]) -> None:
        """Run until nothing is left; requests arrive at their turns."""
        since: dict[int, int] = {}
        while scheduler.waiting or self.turns <= max(arrivals):
            if self.turns in arrivals:
                scheduler.submit(arrivals[self.turns].next_call())
            group = scheduler.next_group()
            since = {c.order: since.get(c.order, self.turns) for c in [*group, *scheduler.waiting]}
            for call in group:
                self.waited.append(self.turns - since[call.order])
                if cast(Any, call).component is not self.resident:
                    self.resident, self.moves = cast(Any, call).component, self.moves + 1
                scheduler.submit(cast(Any, call).owner.next_call())
            self.turns += 1


def scheduler(device: Device | None) -> StepScheduler:
    options: dict[str, Any] = {} if device is None else {"ready": device.ready}
    return StepScheduler(100, lambda _: False, lambda call: call.component.name, lambda _: 1, **options)


def test_requests_in_different_phases_do_not_throw_each_other_out() -> None:
    arrivals = {turn: Requester() for turn in (0, 1, 2, 5, 9, 14, 30)}
    plain, grouped = Device(), Device()
    plain.drive(scheduler(None), {turn: Requester() for turn in arrivals})
    grouped.drive(scheduler(grouped), arrivals)
    assert len(grouped.waited) == len(plain.waited) == len(arrivals) * (STEPS + 1)
    assert grouped.moves <= plain.moves / 1.5


def test_without_moves_the_order_is_that_of_arrival() -> None:
    device = Device()
    every = StepScheduler(100, lambda _: False, lambda c: c.component.name, lambda _: 1, ready=lambda _: True)
    calls = [cast(Call, FakeCall(Requester(), c)) for c in (DENOISER, ENCODER, DENOISER, ENCODER)]
    every.submit(calls)
    assert [every.next_group() for _ in calls] == [[call] for call in calls] and device.moves == 0


@pytest.mark.parametrize("others", [1, 3, 8])
def test_nobody_waits_for_ever(others: int) -> None:
    """Endless denoising, and one who wants to be encoded."""
    device = Device(resident=DENOISER)
    queue = scheduler(device)
    busy = [Requester(10_000) for _ in range(others)]
    for requester in busy:
        requester.left.pop(0)
        queue.submit(requester.next_call())
    late = Requester()
    queue.submit(late.next_call())
    turns = 0
    while len(late.left) == STEPS:
        (call,) = queue.next_group()
        queue.submit(cast(Any, call).owner.next_call())
        turns += 1
        assert turns <= others + PATIENCE + 1
        if cast(Any, call).component is ENCODER:
            break
    assert turns == others + PATIENCE + 1


def test_patience_begins_anew_with_every_oldest_call() -> None:
    device = Device(resident=DENOISER)
    queue = scheduler(device)
    first, second = (cast(Call, FakeCall(Requester(), ENCODER)) for _ in range(2))
    queue.submit([first, second])
    endless = Requester(10_000)
    endless.left.pop(0)
    queue.submit(endless.next_call())
    gaps, turns = [], 0
    while len(gaps) < 2:
        (call,) = queue.next_group()
        if call in (first, second):
            gaps.append(turns)
            turns = 0
        else:
            queue.submit(cast(Any, call).owner.next_call())
            turns += 1
    assert gaps == [PATIENCE, PATIENCE]


def test_ready_calls_are_merged_with_others_wherever_they_stand() -> None:
    device = Device(resident=DENOISER)
    queue = StepScheduler(100, lambda _: True, lambda c: c.component.name, lambda _: 1, ready=device.ready)
    calls = [cast(Call, FakeCall(Requester(), c)) for c in (ENCODER, DENOISER, ENCODER, DENOISER)]
    queue.submit(calls)
    assert queue.next_group() == [calls[1], calls[3]]
    assert queue.next_group() == [calls[0], calls[2]]

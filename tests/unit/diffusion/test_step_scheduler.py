"""Whose turn it is: nothing waits for ever, and what can run together does."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from fake_pipeline import Denoiser

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component
from polymux.diffusion.step_scheduler import StepScheduler

COMPONENTS = [Component(name, Denoiser(), "denoiser") for name in ("transformer", "transformer_2", "text_encoder")]
STATE = TorchState.now("cpu")


def call(key: str = "a", tokens: int = 1, component: int = 0, method: str = "forward", owner: object = None) -> Call:
    made_by = owner if isinstance(owner, CallOwner) else CallOwner()
    return Call(made_by, COMPONENTS[component], method, {"key": key, "tokens": tokens}, STATE)


def scheduler(budget: int = 100, merging: bool = True) -> StepScheduler:
    return StepScheduler(budget, lambda _: merging, lambda c: c.arguments["key"], lambda c: c.arguments["tokens"])


def test_nothing_waits_at_first() -> None:
    assert scheduler().next_group() == []


def test_calls_with_equal_keys_go_together_in_the_order_they_were_made() -> None:
    turns = scheduler()
    calls = [call() for _ in range(5)]
    turns.submit(calls)
    assert turns.next_group() == calls
    assert turns.next_group() == []


def test_a_component_that_must_not_merge_runs_call_by_call() -> None:
    turns = scheduler(merging=False)
    calls = [call(), call()]
    turns.submit(calls)
    assert [turns.next_group(), turns.next_group()] == [[calls[0]], [calls[1]]]


def test_an_incompatible_call_at_the_head_takes_only_its_own_turn() -> None:
    turns = scheduler()
    odd, others = call("odd"), [call() for _ in range(4)]
    turns.submit([odd, *others])
    assert turns.next_group() == [odd]
    assert turns.next_group() == others


def test_compatible_calls_behind_an_incompatible_one_go_first_with_the_head() -> None:
    turns = scheduler()
    first, odd, last = call(), call("odd"), call()
    turns.submit([first, odd, last])
    assert turns.next_group() == [first, last]
    assert turns.next_group() == [odd]


def test_other_components_and_methods_stay_apart() -> None:
    turns = scheduler()
    calls = [call(), call(component=1), call(method="encode")]
    turns.submit(calls)
    assert [turns.next_group() for _ in calls] == [[c] for c in calls]


def test_the_budget_bounds_a_turn() -> None:
    turns = scheduler(budget=100)
    calls = [call(tokens=30) for _ in range(5)]
    turns.submit(calls)
    assert turns.next_group() == calls[:3]
    assert turns.next_group() == calls[3:]


def test_what_still_fits_goes_along() -> None:
    turns = scheduler(budget=100)
    first, second, third, small = call(tokens=40), call(tokens=40), call(tokens=40), call(tokens=10)
    turns.submit([first, second, third, small])
    assert turns.next_group() == [first, second, small]
    assert turns.next_group() == [third]


@pytest.mark.parametrize("tokens", [50, 99, 100, 101, 5000])
def test_a_call_that_fills_the_device_runs_alone(tokens: int) -> None:
    turns = scheduler(budget=100)
    small, large = call(tokens=1), call(tokens=tokens)
    turns.submit([small, large, call(tokens=1), large_too := call(tokens=tokens)])
    groups = [turns.next_group() for _ in range(3)]
    assert [len(group) for group in groups] == [2, 1, 1]
    assert groups[0][0] is small and groups[1] == [large] and groups[2] == [large_too]


def test_the_calls_of_a_session_that_ended_are_forgotten() -> None:
    turns = scheduler()
    gone, stays = CallOwner(), CallOwner()
    turns.submit([call(owner=gone), kept := call(owner=stays), call(owner=gone)])
    turns.forget(gone)
    assert turns.next_group() == [kept]
    assert turns.next_group() == []


@dataclass(eq=False)
class Client(CallOwner):
    """A session in short: `steps` times it makes `width` calls and waits for all of them."""

    key: str
    tokens: int
    width: int
    steps: int
    pending: list[Call] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(30))
def test_every_call_runs_within_a_bounded_number_of_turns(seed: int) -> None:
    """Random arrivals of sessions of every kind: a call waits for no more turns than there were calls before it."""
    chance = random.Random(seed)
    turns = scheduler(budget=chance.choice([1, 20, 100]), merging=chance.random() < 0.9)
    clients: list[Client] = []
    ran: Counter[Call] = Counter()
    due: dict[Call, int] = {}  # the turn by which a call must have run
    turn = arrived = 0
    while clients or arrived < 60:
        while arrived < 60 and (not clients or chance.random() < 0.5):
            arrived += 1
            steps = chance.choice([1, 2, 5, 60])
            clients.append(Client(chance.choice("abc"), chance.choice([1, 10, 60, 300]), chance.randint(1, 3), steps))
        for client in clients:
            if not client.pending:
                client.steps -= 1
                client.pending = [
                    call(client.key, client.tokens, chance.randrange(3), owner=client) for _ in range(client.width)
                ]
                for waiting in client.pending:
                    due[waiting] = turn + len(turns.waiting) + 1
                    turns.submit([waiting])
        group = turns.next_group()
        turn += 1
        assert group
        for done in group:
            ran[done] += 1
            assert turn <= due[done]
            done.owner.pending.remove(done)  # type: ignore[attr-defined]
        if clients and chance.random() < 0.05:  # one leaves
            gone = chance.choice(clients)
            turns.forget(gone)
            gone.pending, gone.steps = [], 0
        clients = [c for c in clients if c.steps > 0 or c.pending]
    assert not turns.waiting
    assert set(ran.values()) == {1}


def test_a_long_request_does_not_starve_short_ones() -> None:
    """However long the long one is, a short one gets a step for every step of it."""
    turns = scheduler(budget=10)
    long, short = Client("a", 300, 1, 10**6), Client("b", 1, 1, 20)
    while short.steps:
        for client in (long, short):
            if not client.pending:
                client.pending = [call(client.key, client.tokens, owner=client)]
                turns.submit(client.pending)
        (done,) = turns.next_group()
        done.owner.pending = []  # type: ignore[attr-defined]
        done.owner.steps -= 1  # type: ignore[attr-defined]
    assert 10**6 - long.steps <= 21


def test_the_order_of_calls_is_kept_in_a_long_queue() -> None:
    turns = scheduler(budget=10**9)
    calls = [call("ab"[i % 2]) for i in range(2000)]
    turns.submit(calls)
    assert turns.next_group() == calls[::2]
    assert turns.next_group() == calls[1::2]
    assert [c.order for c in calls] == list(range(2000))

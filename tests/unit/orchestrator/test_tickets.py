"""Every request ends once, for its consumer and in the numbers."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polymux.config import EngineConfig
from polymux.errors import (
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    PolymuxError,
    QueueFullError,
    RequestAbortedError,
    StageDeadError,
    from_info,
)
from polymux.metrics import Metrics
from polymux.orchestrator.admission import admit
from polymux.orchestrator.tickets import Ticket, Tickets, outcome_of
from polymux.request import Capabilities, Event, Failed, Finished, Preview, Progress, Request, RequestMetrics

CAPABILITIES = Capabilities(
    family=None, pipeline="P", modality="image", arguments=("prompt",), required=("prompt",), media={}
)


def finished(request_id: str) -> Finished:
    return Finished(request_id, "image", [], [], RequestMetrics())


def failed(request_id: str, error: PolymuxError) -> Failed:
    return Failed(request_id, error.info())


def numbers(metrics: Metrics) -> dict[str, float]:
    """Samples by name, or by name and outcome."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [s for family in families for s in family.samples if not s.name.endswith("_created")]
    return {s.labels.get("outcome", s.name): s.value for s in samples}


def opened(tickets: Tickets, request_id: str) -> Ticket:
    return tickets.open(Request(request_id=request_id))


def deliver(tickets: Tickets, event: Event) -> None:
    """As the stage says it, the only one there is."""
    ticket = tickets.get(event.request_id)
    if ticket is None:
        return
    if not isinstance(event, (Finished, Failed)):
        tickets.deliver(ticket, event)
    else:
        tickets.end(ticket, from_info(event.error) if isinstance(event, Failed) else event)
        tickets.release(ticket)


async def everything(ticket: Ticket) -> list[object]:
    got: list[object] = []
    try:
        async for event in ticket.events():
            got.append(event)
    except PolymuxError as error:
        got.append(error)
    return got


def test_progress_and_then_the_output() -> None:
    tickets = Tickets(Metrics("m"))
    ticket = opened(tickets, "a")
    preview = Preview("a", 0, 1, [])
    events = [Progress("a", "denoise", 1, 2), preview, Progress("a", "denoise", 2, 2), finished("a")]
    for event in events:
        deliver(tickets, event)
    deliver(tickets, Progress("unknown", "denoise", 1, 2))
    assert asyncio.run(everything(ticket)) == events
    assert "a" not in tickets


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GenerationError("x"), "failed"),
        (StageDeadError("x"), "failed"),
        (InvalidRequestError("x", param="height"), "refused"),
        (RequestAbortedError("x"), "aborted"),
    ],
)
def test_a_failure_raises_what_it_was(error: PolymuxError, outcome: str) -> None:
    metrics = Metrics("m")
    tickets = Tickets(metrics)
    ticket = opened(tickets, "a")
    deliver(tickets, failed("a", error))
    (got,) = asyncio.run(everything(ticket))
    assert type(got) is type(error)
    assert isinstance(got, PolymuxError)
    assert (got.message, got.param) == (error.message, error.param)
    assert outcome_of(error) == outcome
    counted = {name: n for name, n in numbers(metrics).items() if name in ("completed", "failed", "aborted", "refused")}
    assert counted == dict.fromkeys(counted, 0.0) | {outcome: 1.0}


def test_an_aborted_request_ends_at_once_and_stays_known_until_the_stage_lets_go() -> None:
    metrics = Metrics("m")
    tickets = Tickets(metrics)
    ticket = opened(tickets, "a")
    deliver(tickets, Progress("a", "denoise", 1, 9))
    assert tickets.abort("a")
    assert not tickets.abort("a")
    assert "a" in tickets
    assert (tickets.live, tickets.running, tickets.waiting) == (0, 1, 0)
    deliver(tickets, Progress("a", "denoise", 2, 9))
    deliver(tickets, finished("a"))  # it crossed the abort
    assert "a" not in tickets
    assert (tickets.live, tickets.running, tickets.waiting) == (0, 0, 0)
    events = asyncio.run(everything(ticket))
    assert [type(event) for event in events] == [Progress, RequestAbortedError]
    assert (numbers(metrics)["aborted"], numbers(metrics)["completed"]) == (1, 0)


def test_running_and_waiting() -> None:
    metrics = Metrics("m")
    tickets = Tickets(metrics)
    for request_id in ("a", "b", "c"):
        opened(tickets, request_id)
    deliver(tickets, Progress("a", "encode", 0, 0))
    deliver(tickets, Progress("b", "queued", 0, 0))
    shown = numbers(metrics)
    assert (shown["polymux:num_requests_running"], shown["polymux:num_requests_waiting"]) == (1, 2)
    tickets.fail_all(StageDeadError("gone"))
    shown = numbers(metrics)
    assert (shown["polymux:num_requests_running"], shown["polymux:num_requests_waiting"], shown["failed"]) == (0, 0, 3)


def test_failing_all_gives_each_its_own_error() -> None:
    tickets = Tickets(Metrics("m"))
    both = [opened(tickets, "a"), opened(tickets, "b")]
    tickets.fail_all(NotReadyError("gone"))
    (one,), (two,) = (asyncio.run(everything(ticket)) for ticket in both)
    assert one is not two


def test_latency_counts_successes_only() -> None:
    metrics = Metrics("m")
    tickets = Tickets(metrics)
    for request_id in "abc":
        opened(tickets, request_id)
    deliver(tickets, finished("a"))
    deliver(tickets, failed("b", GenerationError("x")))
    tickets.abort("c")
    assert numbers(metrics)["polymux:e2e_request_latency_seconds_count"] == 1


def test_waiting_for_none() -> None:
    async def scenario() -> None:
        tickets = Tickets(Metrics("m"))
        await tickets.until_none_live()
        opened(tickets, "a")
        waiting = asyncio.create_task(tickets.until_none_live())
        await asyncio.sleep(0)
        assert not waiting.done()
        tickets.abort("a")
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 1), (0.2, 1), (7.1, 8), (60.0, 60), (1e9, 60)])
def test_a_full_queue_says_when_to_come_again(seconds: float, told: int) -> None:
    config = EngineConfig.from_flat(model="m", max_num_seqs=1, max_queue=0)
    with pytest.raises(QueueFullError) as caught:
        admit(Request(request_id="1", prompt="a"), CAPABILITIES, config, 1, seconds)
    assert caught.value.retry_after_s == told


def test_the_estimate_follows_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tickets = Tickets(Metrics("m"))
    assert tickets.seconds_until_one_ends() == 0  # nothing is known
    for name in "ab":
        opened(tickets, name)
        deliver(tickets, Progress(name, "denoise", 1, 9))
    now += 10
    assert tickets.seconds_until_one_ends() == 10 / 2  # two run, for ten seconds already
    deliver(tickets, finished("a"))
    deliver(tickets, finished("b"))
    assert tickets.seconds_until_one_ends() == 10  # one that starts now takes about as long
    for name in "cdef":
        opened(tickets, name)
        deliver(tickets, Progress(name, "denoise", 1, 9))
    opened(tickets, "waits")
    deliver(tickets, Progress("waits", "queued", 0, 0))
    assert tickets.seconds_until_one_ends() == 10 / 4

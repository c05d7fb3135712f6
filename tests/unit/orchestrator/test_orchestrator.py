"""The orchestrator over real stage processes: what becomes of requests, how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from orchestrator_harness import LONG, Harness, MakeStage, exists, run, started, until

from polymux.config import EngineConfig
from polymux.errors import (
    CheckpointError,
    ConfigError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    PolymuxError,
    QueueFullError,
    RequestAbortedError,
    StageDeadError,
)
from polymux.orchestrator.orchestrator import Orchestrator
from polymux.orchestrator.stage_client import ProcessStage
from polymux.request import Finished, OmniDiffusionSamplingParams, Progress, Request


def test_requests_are_answered_and_counted(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, max_num_seqs=4) as h:
            assert h.number("polymux:denoise_steps_total") == 0  # the warm-up does not count
            good = [h.ask(f"good{i}", steps=i + 1, seed=i) for i in range(10)]
            bad = [h.ask("steps", steps=0), h.ask("size", width=60), h.ask("prompt", prompt="picky")]
            answers = await asyncio.gather(*good, *bad, return_exceptions=True)
            for i, events in enumerate(answers[:10]):
                assert isinstance(events, list)
                *progress, last = events
                assert [event.step for event in progress] == list(range(1, i + 2))
                assert isinstance(last, Finished)
                assert (last.request_id, last.seeds) == (f"good{i}", [i])
            assert [type(error) for error in answers[10:]] == [InvalidRequestError] * 3
            assert h.outcomes() == (10, 0, 0, 3)
            assert h.number("polymux:denoise_steps_total") == 55
            assert h.number("polymux:e2e_request_latency_seconds_count") == 10
            assert h.number("polymux:num_requests_running") == h.number("polymux:num_requests_waiting") == 0

    run(scenario())


def test_a_request_that_fails_fails_alone(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            tasks = [h.ask("1", steps=3), h.ask("2", prompt="fail"), h.ask("3", steps=3)]
            one, two, three = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(one, list)
            assert isinstance(three, list)
            assert isinstance(two, GenerationError)
            assert h.outcomes() == (2, 1, 0, 0)

    run(scenario())


@pytest.mark.parametrize("how", ["cancel the task", "close the generator", "abort", "abort while it waits"])
def test_leaving_early_reaches_the_engine(make_stage: MakeStage, how: str) -> None:
    async def scenario() -> None:
        async with started(make_stage, max_num_seqs=1) as h:
            if how == "cancel the task":
                task = await h.ask_and_see_it_run("1")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "close the generator":
                params = OmniDiffusionSamplingParams(num_inference_steps=LONG)
                events = h.orchestrator.generate(Request(request_id="1", prompt="a", params=params))
                assert isinstance(await anext(events), Progress)
                await events.aclose()
            elif how == "abort":
                task = await h.ask_and_see_it_run("1")
                assert h.orchestrator.abort("1")
                with pytest.raises(RequestAbortedError):
                    await task
                assert not h.orchestrator.abort("1")
            else:
                first = await h.ask_and_see_it_run("0", steps=30)
                second = h.ask("1", LONG)
                await until(lambda: h.number("polymux:num_requests_waiting") == 1)
                assert h.orchestrator.abort("1")
                await first
                with pytest.raises(RequestAbortedError):
                    await second
            (*_, last) = await h.ask("after")
            assert isinstance(last, Finished)
            await until(lambda: h.number("polymux:num_requests_running") == 0)
            stats = h.orchestrator.replicas[0].stats
            assert stats.running == stats.waiting == 0
            assert h.outcomes()[2] == 1

    run(scenario())


def test_an_id_can_be_used_again_but_not_twice_at_once(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            first = await h.ask_and_see_it_run("x")
            with pytest.raises(InvalidRequestError, match="request_id='x'"):
                await h.ask("x")
            assert not first.done()
            h.orchestrator.abort("x")
            with pytest.raises(RequestAbortedError):
                await first
            await until(lambda: h.number("polymux:num_requests_running") == 0)
            assert len(await h.ask("x")) == 2

    run(scenario())


def test_the_queue_is_bounded(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, max_num_seqs=1, max_queue=2) as h:
            tasks = [await h.ask_and_see_it_run("0")] + [h.ask(str(i), LONG) for i in (1, 2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=r"1 running \(--max-num-seqs\) and 2 waiting \(--max-queue\)"):
                await h.ask("3")
            with pytest.raises(InvalidRequestError):  # no use in trying it again, so no 429
                await h.ask("3", steps=0)
            h.orchestrator.abort("2")
            tasks.append(h.ask("3", LONG))
            await until(lambda: h.number("polymux:num_requests_waiting") == 2)
            assert h.outcomes() == (0, 0, 1, 2)
            for request_id in "013":
                h.orchestrator.abort(request_id)
            assert {type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)} == {RequestAbortedError}

    run(scenario())


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("missing", CheckpointError, "'a.weight' is missing"),
        ("bug", GenerationError, "a bug"),
        ("exit", StageDeadError, "exit code 3"),
    ],
)
def test_what_keeps_a_stage_from_starting_is_raised(
    make_stage: MakeStage, model: str, error: type[PolymuxError], message: str
) -> None:
    async def scenario() -> None:
        h = Harness(make_stage, model=model, restart_stages=True)
        with pytest.raises(error, match=message):
            await h.orchestrator.start()
        assert (h.orchestrator.status, len(h.stages)) == ("dead", 1)
        assert not exists(h.pid)
        assert isinstance(await h.orchestrator.until_dead(), error)
        await h.orchestrator.close()

    run(scenario())


def test_a_stage_that_does_not_get_ready(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        h = Harness(make_stage, model="never", stage_init_timeout=1)
        with pytest.raises(NotReadyError, match=r"within 1 s \(--stage-init-timeout\)"):
            await h.orchestrator.start()
        assert not exists(h.pid)

    run(scenario())


def test_a_command_that_is_missing() -> None:
    async def scenario() -> None:
        orchestrator = Orchestrator(EngineConfig.from_flat(model="x"), lambda: ProcessStage(("/no/such/program",)))
        with pytest.raises(StageDeadError, match="cannot be started"):
            await orchestrator.start()

    run(scenario())


def test_an_argument_that_cannot_travel() -> None:
    async def scenario() -> None:
        config = EngineConfig.from_flat(model="x", diffusers_load_kwargs={"quantization_config": object()})
        with pytest.raises(ConfigError, match="cannot be sent"):
            await Orchestrator(config).start()

    run(scenario())


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_ended_while_it_is_loading(make_stage: MakeStage, how: str) -> None:
    async def scenario() -> None:
        h = Harness(make_stage, model="never")
        starting = asyncio.create_task(h.orchestrator.start())
        await until(lambda: bool(h.stages) and h.stages[0].pid is not None)
        if how == "cancelled":
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:
            await h.orchestrator.close()
            with pytest.raises(NotReadyError):
                await starting
        assert h.orchestrator.status == "dead"
        assert not exists(h.pid)

    run(scenario())


def test_draining_lets_requests_finish(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            task = await h.ask_and_see_it_run("1", steps=50)
            draining = asyncio.create_task(h.orchestrator.drain(60))
            await asyncio.sleep(0)
            assert h.orchestrator.status == "draining"
            with pytest.raises(NotReadyError, match="shutting down"):
                await h.ask("2")
            assert isinstance((await task)[-1], Finished)
            await draining
            assert h.orchestrator.status == "dead"
            assert await h.orchestrator.until_dead() is None
            assert not exists(h.pid)

    run(scenario())


def test_draining_ends_what_takes_longer_than_the_grace(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            task = await h.ask_and_see_it_run("1")
            await h.orchestrator.drain(0.05)
            with pytest.raises(NotReadyError, match="before the request was done"):
                await task
            assert await h.orchestrator.until_dead() is None

    run(scenario())


def test_a_stage_that_does_not_stop_is_killed(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymux.orchestrator.stage_client.STOP_WAIT_S", 0.2)

    async def scenario() -> None:
        async with started(make_stage, model="deaf") as h:
            await h.orchestrator.close()
            assert not exists(h.pid)
            assert await h.orchestrator.until_dead() is None

    run(scenario())


def test_nothing_is_left_when_the_event_loop_ends_without_close(make_stage: MakeStage) -> None:
    async def scenario() -> Harness:
        h = Harness(make_stage)
        await h.orchestrator.start()
        return h

    assert not exists(run(scenario()).pid)


def test_two_in_one_process(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as one, started(make_stage) as two:
            await asyncio.gather(one.ask("1"), two.ask("1"), two.ask("2"))
            assert (one.outcomes(), two.outcomes()) == ((1, 0, 0, 0), (2, 0, 0, 0))
            os.kill(one.pid, signal.SIGKILL)
            await one.orchestrator.until_dead()
            assert isinstance((await two.ask("3"))[-1], Finished)

    run(scenario())


def test_it_starts_once(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            with pytest.raises(RuntimeError, match="starts once"):
                await h.orchestrator.start()
        closed = Harness(make_stage).orchestrator
        await closed.close()
        with pytest.raises(RuntimeError, match="starts once"):
            await closed.start()

    run(scenario())

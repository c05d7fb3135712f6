"""A model goes to sleep when its requests are done, refuses others meanwhile, and wakes up."""

from __future__ import annotations

import asyncio

import pytest
from orchestrator_harness import MakeStage, run, started, until

from polymux.errors import CheckpointError, ConfigError, InvalidRequestError, NotReadyError, StageDeadError


def test_requests_under_way_finish_first_and_others_are_refused_until_it_wakes(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            task = await h.ask_and_see_it_run("a", steps=300)
            nap = asyncio.create_task(h.orchestrator.sleep(2))
            await until(lambda: h.orchestrator.status == "asleep")
            assert not nap.done()
            with pytest.raises(NotReadyError, match="asleep"):
                await h.ask("b")
            assert h.number("polymux:host_memory_bytes") == 5000
            assert await nap == 2000
            assert h.number("polymux:host_memory_bytes") == 3000
            assert len(task.result()) > 300  # progress of every step, and the output
            assert h.number("polymux:stage_ready") == 0
            with pytest.raises(NotReadyError, match="asleep"):
                await h.ask("c")
            with pytest.raises(NotReadyError, match="asleep"):
                await h.orchestrator.sleep(1)
            await h.orchestrator.wake_up()
            await h.orchestrator.wake_up()  # it is awake
            assert h.orchestrator.status == "ready"
            assert h.number("polymux:host_memory_bytes") == 5000
            assert await h.ask("d")

    run(scenario())


@pytest.mark.parametrize("level", [0, 3, -1])
def test_a_level_that_does_not_exist(make_stage: MakeStage, level: int) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            with pytest.raises(InvalidRequestError, match=f"level={level}") as caught:
                await h.orchestrator.sleep(level)
            assert caught.value.param == "level" and h.orchestrator.status == "ready"

    run(scenario())


def test_a_model_that_cannot_sleep_stays_awake(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, model="restless") as h:
            with pytest.raises(ConfigError, match="cannot be moved"):
                await h.orchestrator.sleep(1)
            assert await h.ask("a")

    run(scenario())


def test_a_model_that_does_not_wake_up_stays_asleep_and_may_try_again(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, model="tired") as h:
            await h.orchestrator.sleep(2)
            with pytest.raises(CheckpointError):
                await h.orchestrator.wake_up()
            assert h.orchestrator.status == "asleep"
            await h.orchestrator.wake_up()
            assert await h.ask("a")

    run(scenario())


@pytest.mark.parametrize("restart", [False, True])
def test_a_stage_that_dies_on_its_way_to_sleep(make_stage: MakeStage, restart: bool) -> None:
    async def scenario() -> None:
        async with started(make_stage, model="coma", restart_stages=restart) as h:
            with pytest.raises(StageDeadError):
                await h.orchestrator.sleep(1)
            await until(lambda: h.orchestrator.status == ("ready" if restart else "dead"))
            if restart:
                assert await h.ask("a")

    run(scenario())


def test_whoever_asked_may_leave(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, model="slow") as h:
            nap = asyncio.create_task(h.orchestrator.sleep(1))
            await asyncio.sleep(0.05)
            nap.cancel()
            await h.orchestrator.wake_up()  # waits until it sleeps
            assert h.orchestrator.status == "ready" and await h.ask("a")

    run(scenario())


def test_shutting_down_while_falling_asleep_and_while_asleep(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            await h.ask_and_see_it_run("a")
            nap = asyncio.create_task(h.orchestrator.sleep(1))
            await asyncio.sleep(0.02)
            await h.orchestrator.drain(0)
            with pytest.raises(NotReadyError):
                await nap
        async with started(make_stage) as h:
            await h.orchestrator.sleep(1)
            await h.orchestrator.drain(5)
            assert h.orchestrator.status == "dead" and h.orchestrator.reason is None

    run(scenario())

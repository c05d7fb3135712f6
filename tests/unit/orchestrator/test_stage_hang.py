"""A stage that lives and does nothing is noticed, if it has something to do."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from orchestrator_harness import LONG, MakeStage, exists, run, started, until

from polymux.errors import StageDeadError
from polymux.orchestrator.watchdog import TICKS, Watchdog
from polymux.request import OmniDiffusionSamplingParams, OutputChunk, Request

PATIENCE = 0.4


@pytest.mark.parametrize("how", ["SIGSTOP", "a call that never returns"])
def test_a_stage_that_hangs_is_killed(make_stage: MakeStage, how: str) -> None:
    async def scenario() -> None:
        async with started(make_stage, stage_hang_timeout=PATIENCE, max_num_seqs=1) as h:
            if how == "SIGSTOP":
                tasks = [await h.ask_and_see_it_run("0"), h.ask("1", LONG)]
                os.kill(h.pid, signal.SIGSTOP)
            else:
                tasks = [h.ask("0", prompt="hang"), h.ask("1", LONG)]
            async with asyncio.timeout(10):
                errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(error) for error in errors} == {StageDeadError}
            reason = await h.orchestrator.until_dead()
            assert reason is not None
            assert "--stage-hang-timeout" in reason.message
            assert not exists(h.pid)

    run(scenario())


def test_it_is_started_again(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, stage_hang_timeout=PATIENCE, restart_stages=True) as h:
            task, first = await h.ask_and_see_it_run("0"), h.pid
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(StageDeadError):
                await task
            await until(lambda: h.orchestrator.status == "ready")
            assert not exists(first)
            await h.ask("1", steps=3)

    run(scenario())


def test_one_that_works_or_has_nothing_to_do_is_left_alone(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, stage_hang_timeout=PATIENCE) as h:
            task, pid = await h.ask_and_see_it_run("0"), h.pid
            await asyncio.sleep(3 * PATIENCE)
            assert not task.done()
            h.orchestrator.abort("0")
            await until(lambda: h.number("polymux:num_requests_running") == 0)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(3 * PATIENCE)
            assert h.orchestrator.status == "ready"
            os.kill(pid, signal.SIGCONT)
            await h.ask("1", steps=3)

    run(scenario())


def test_an_aborted_request_counts_until_the_stage_lets_go(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, stage_hang_timeout=PATIENCE) as h:
            await h.ask_and_see_it_run("0")
            os.kill(h.pid, signal.SIGSTOP)
            h.orchestrator.abort("0")
            async with asyncio.timeout(10):
                await h.orchestrator.until_dead()

    run(scenario())


def test_it_is_not_the_stage_that_hangs_if_the_consumer_is_slow(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, stage_hang_timeout=PATIENCE) as h:
            request = Request(request_id="0", prompt="parts", params=OmniDiffusionSamplingParams())
            events = h.orchestrator.generate(request)
            parts = 0
            async for event in events:
                if isinstance(event, OutputChunk):
                    parts += 1
                    await asyncio.sleep(3 * PATIENCE if parts in (1, 3) else 0)
                    if parts == 3:
                        break
            assert h.orchestrator.status == "ready"
            os.kill(h.pid, signal.SIGSTOP)  # now it is the stage's turn
            with pytest.raises(StageDeadError):
                async for _ in events:
                    pass

    run(scenario())


def test_a_stage_that_does_not_wake_up_in_time(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage) as h:
            await h.orchestrator.sleep(1)
            os.kill(h.pid, signal.SIGSTOP)
            object.__setattr__(h.orchestrator.config.process, "stage_init_timeout", 0.2)
            with pytest.raises(StageDeadError, match="--stage-init-timeout"):
                await h.orchestrator.wake_up()
            async with asyncio.timeout(10):
                await h.orchestrator.until_dead()

    run(scenario())


def test_off_is_off() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Watchdog(0, lambda: True).until_hung()

    run(scenario())


def test_silence_counts_in_a_row() -> None:
    async def scenario() -> None:
        looks = 0

        def busy() -> bool:
            nonlocal looks
            looks += 1
            if looks < 10 * TICKS and looks % TICKS == 0:
                watchdog.heard()
            return looks % (2 * TICKS) != 0 or looks > 10 * TICKS

        watchdog = Watchdog(0.01, busy)
        await watchdog.until_hung()
        assert looks > 10 * TICKS

    run(scenario())

"""What becomes of requests, and of what a stage leaves behind, when its process dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil
import pytest
from orchestrator_harness import LONG, Harness, MakeStage, exists, run, started, until

from polymux.config import EngineConfig
from polymux.errors import (
    NotReadyError,
    PolymuxError,
    StageDeadError,
)
from polymux.orchestrator import launch
from polymux.orchestrator.orchestrator import Orchestrator
from polymux.orchestrator.stage_client import ProcessStage


@pytest.mark.parametrize("how", ["kill -9", "SIGSEGV", "an exception", "garbage", "garbage of one message"])
def test_when_the_stage_dies_all_who_wait_hear_of_it(make_stage: MakeStage, how: str) -> None:
    async def scenario() -> None:
        async with started(make_stage, max_num_seqs=1) as h:
            tasks = [await h.ask_and_see_it_run("0", steps=LONG), h.ask("1", LONG), h.ask("2", LONG)]
            await asyncio.sleep(0)
            if how == "kill -9":
                os.kill(h.pid, signal.SIGKILL)
            elif how == "SIGSEGV":
                os.kill(h.pid, signal.SIGSEGV)
            elif how == "an exception":
                h.orchestrator.abort("0")
                tasks[0] = h.ask("crash", prompt="crash")
                h.orchestrator.abort("1")
                h.orchestrator.abort("2")
                tasks = tasks[:1]
            else:
                data = b"\0\0\0\5hello" if how == "garbage" else b"\0\0\0\2\x81\xa4"
                h.stages[-1]._writer.write(data)  # the stage then finds garbage, and gives up
            async with asyncio.timeout(5):
                errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(error) for error in errors} == {StageDeadError}
            assert not any("/secret" in str(error) for error in errors)
            reason = await h.orchestrator.until_dead()
            assert isinstance(reason, PolymuxError)
            if how == "kill -9":
                assert "SIGKILL" in reason.message
            assert h.orchestrator.status == "dead"
            with pytest.raises(NotReadyError):
                h.orchestrator.check_ready()
            with pytest.raises(NotReadyError, match="is gone"):
                await h.ask("later")
            assert h.number("polymux:stage_ready") == h.number("polymux:num_requests_running") == 0

    run(scenario())


def test_a_stage_that_talks_garbage_is_ended(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        h = Harness(make_stage, model="chatty")
        with pytest.raises(StageDeadError, match="what is not a message"):
            await h.orchestrator.start()
        assert not exists(h.pid)

    run(scenario())


def test_children_of_a_dead_stage_do_not_hide_its_death(make_stage: MakeStage) -> None:
    """The child holds the stage's end of the socket open."""

    async def scenario() -> None:
        async with started(make_stage, model="parent") as h:
            (child,) = psutil.Process(h.pid).children()
            task = await h.ask_and_see_it_run("0")
            os.kill(h.pid, signal.SIGKILL)
            with pytest.raises(StageDeadError):
                async with asyncio.timeout(5):
                    await task
            await until(lambda: not exists(child.pid))

    run(scenario())


def test_restart(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, restart_stages=True) as h:
            await h.ask("1", steps=5)
            task = await h.ask_and_see_it_run("2")
            first = h.pid
            os.kill(first, signal.SIGKILL)
            with pytest.raises(StageDeadError):
                await task
            assert h.orchestrator.status == "loading"
            with pytest.raises(NotReadyError, match="loading again"):
                await h.ask("3")
            await until(lambda: h.orchestrator.status == "ready")
            before = h.number("polymux:denoise_steps_total")
            await h.ask("4", steps=7)
            assert h.number("polymux:denoise_steps_total") == before + 7
            assert h.pid != first
            assert not exists(first)
            assert h.number("polymux:stage_restarts_total") == 1
            assert h.orchestrator.reason is None

    run(scenario())


def test_a_restart_that_does_not_work_is_the_end(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RESTART_DELAYS_S", (0.0, 0.0))
    broken = ProcessStage((sys.executable, "-c", "raise SystemExit(3)"))
    stages = [make_stage(), broken, ProcessStage(broken._command)]

    async def scenario() -> None:
        config = EngineConfig.from_flat(model="fake", restart_stages=True)
        orchestrator = Orchestrator(config, lambda: stages.pop(0))
        await orchestrator.start()
        orchestrator.kill()
        reason = await orchestrator.until_dead()
        assert reason is not None
        assert "exit code 3" in reason.message
        assert stages == []
        await orchestrator.close()

    run(scenario())

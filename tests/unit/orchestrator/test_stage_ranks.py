"""A stage of several ranks: all do what rank 0 does, and none is left when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from orchestrator_harness import LONG, Harness, exists, run, started, until

from polymux.errors import ConfigError, StageDeadError
from polymux.orchestrator.stage_client import ProcessStage

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("fake_ranks.py")))


@contextlib.asynccontextmanager
async def ranks(size: int = 2, **engine_args: Any) -> AsyncIterator[tuple[Harness, list[int]]]:
    """A running stage, and its processes in the order of their ranks."""
    async with started(lambda: ProcessStage(COMMAND), cfg_parallel_size=size, **engine_args) as harness:
        yield harness, pids(harness)


def pids(harness: Harness) -> list[int]:
    children = psutil.Process(harness.pid).children()
    return [harness.pid, *(child.pid for child in sorted(children, key=lambda child: child.pid))]


async def all_gone(processes: list[int]) -> None:
    await until(lambda: not any(map(exists, processes)))


def test_all_ranks_have_the_same_requests_and_seeds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ranks(3) as (h, processes):
            assert len(processes) == 3
            for name in ("one", "two"):
                folder = tmp_path / name
                folder.mkdir()
                events = await h.ask(name, steps=3, prompt=f"note {folder}")
                await until(lambda folder=folder: len(list(folder.iterdir())) == 3)  # type: ignore[misc]
                seeds = {file.read_text() for file in folder.iterdir()}
                assert seeds == {str(events[-1].seeds[0])} and seeds != {"None"}
            left = await h.ask_and_see_it_run("left")
            left.cancel()
            await h.ask("after")
        await all_gone(processes)

    run(scenario())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_kill_9_of_a_rank(rank: int) -> None:
    async def scenario() -> None:
        async with ranks(3, restart_stages=rank == 2) as (h, processes):
            task = await h.ask_and_see_it_run("1")
            os.kill(processes[rank], signal.SIGKILL)
            with pytest.raises(StageDeadError):
                async with asyncio.timeout(10):
                    await task
            await all_gone(processes)
            if rank == 2:
                await until(lambda: h.orchestrator.status == "ready")
                await h.ask("2")
                assert not set(pids(h)) & set(processes)
            else:
                reason = await h.orchestrator.until_dead()
                assert reason is not None
                assert "SIGKILL" in reason.message
                assert rank == 0 or f"rank {rank} (process {processes[rank]}) is gone" in reason.message

    run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_counts_as_dead(rank: int) -> None:
    async def scenario() -> None:
        async with ranks() as (h, processes):
            task = await h.ask_and_see_it_run("1")
            os.kill(processes[rank], signal.SIGSTOP)
            with pytest.raises(StageDeadError):
                async with asyncio.timeout(10):
                    await task
            await all_gone(processes)

    run(scenario())


def test_what_a_rank_says_before_it_ends_is_the_reason() -> None:
    async def scenario() -> None:
        async with ranks() as (h, processes):
            with pytest.raises(StageDeadError):
                await h.ask("1", steps=LONG, prompt="raise on 1")
            reason = await h.orchestrator.until_dead()
            assert reason is not None
            assert "RuntimeError: device-side assert" in reason.message
            await all_gone(processes)

    run(scenario())


def test_all_sleep_or_none() -> None:
    async def scenario() -> None:
        async with ranks() as (h, _):
            assert await h.orchestrator.sleep(2) == 4000
            await h.orchestrator.wake_up()
            await h.ask("1")
        async with ranks(model="restless on 1") as (h, _):
            with pytest.raises(ConfigError, match="cannot be moved"):
                await h.orchestrator.sleep(1)
            await h.ask("1")

    run(scenario())


def test_a_killed_api_process_leaves_no_rank(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_stage_ranks import ranks
async def main():
    async with ranks(3) as (h, processes):
        print(*processes, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        processes = list(map(int, (await process.stdout.readline()).split()))
        assert len(processes) == 3
        process.kill()
        await process.wait()
        await all_gone(processes)

    run(scenario())

"""Three stages: the way goes through all of them, or ends early; and what becomes of it when one of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from orchestrator_harness import Harness, run, started, until
from test_graph import FAKE, ask, memory_files, pid_of, spoken

from polymux.errors import RequestAbortedError, StageDeadError
from polymux.orchestrator.stage_client import ProcessStage
from polymux.request import Finished


def make() -> ProcessStage:
    return ProcessStage(FAKE)


@pytest.fixture
def three(tmp_path: Path) -> dict[str, Any]:
    """A model of three stages, by its word."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}))
    return {"model": str(tmp_path), "split_stages": True}


async def nothing_is_held(h: Harness) -> None:
    await until(lambda: not any(memory_files(pid_of(h, replica)) for replica in h.orchestrator.replicas))


def test_chunks_come_through_all_of_them_or_stay(three: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with started(make, **three) as h:
            answers = [ask(h, str(i), f"chunks {i + 1} floats 100000") for i in range(4)]
            mute = await ask(h, "mute", "mute")
            assert isinstance(mute[-1], Finished) and (mute[-1].seeds, mute[-1].metrics.audio_tokens) == ([7], 0)
            for i, events in enumerate(await asyncio.gather(*answers)):
                assert spoken(events) == [[number, 100_000] for number in range(i + 1)]
                last = events[-1]
                assert isinstance(last, Finished)
                assert (last.seeds, last.metrics.steps, last.metrics.audio_tokens) == ([7], i + 1, 3)
            for source, target in (("0", "1"), ("1", "2")):  # nothing of the one that is mute
                edge = {"from_stage": source, "to_stage": target}
                assert h.number("polymux:transfer_bytes_total", **edge) == 10 * 4 * 100_000
                assert h.number("polymux:transfer_seconds_count", **edge) == 10
            await nothing_is_held(h)

    run(scenario())


def test_an_abort_reaches_all_of_them(three: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with started(make, **three) as h:
            task = ask(h, "0", "stall chunks 9 floats 100000")
            await until(lambda: "0" in h.orchestrator.replicas[2].legs)
            h.orchestrator.abort("0")
            with pytest.raises(RequestAbortedError):
                await task
            await until(lambda: not any(replica.legs for replica in h.orchestrator.replicas))
            await nothing_is_held(h)

    run(scenario())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_death_of_any_of_them_fails_its_requests(three: dict[str, Any], stage: int) -> None:
    async def scenario() -> None:
        shared = set(os.listdir("/dev/shm"))
        async with started(make, **three, restart_stages=True) as h:
            replicas = h.orchestrator.replicas
            task, mute = ask(h, "0", "stall chunks 9 floats 100000"), ask(h, "mute", "stall mute")
            await until(lambda: "0" in replicas[2].legs and "mute" in replicas[0].legs)
            os.kill(pid_of(h, replicas[stage]), signal.SIGKILL)
            async with asyncio.timeout(5):
                with pytest.raises(StageDeadError):
                    await task
            await until(lambda: h.orchestrator.status == "ready" and "0" not in replicas[0].legs)
            if stage == 0:
                with pytest.raises(StageDeadError):
                    await mute
            else:
                assert not mute.done()  # it has no business with that stage
                h.orchestrator.abort("mute")
                with pytest.raises(RequestAbortedError):
                    await mute
            await nothing_is_held(h)
            assert spoken(await ask(h, "1", "chunks 2")) == [[0, 1], [1, 1]]
        assert set(os.listdir("/dev/shm")) <= shared

    run(scenario())

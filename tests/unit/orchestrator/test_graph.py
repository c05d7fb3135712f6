"""Two stages in processes of their own: the way of a request, and what becomes of it when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from orchestrator_harness import Harness, exists, run, started, until

from polymux.config import EngineConfig
from polymux.errors import ConfigError, GenerationError, RequestAbortedError, StageDeadError
from polymux.omni_output import samples_of
from polymux.orchestrator.orchestrator import Orchestrator
from polymux.orchestrator.replica import Replica
from polymux.orchestrator.stage_client import ProcessStage
from polymux.request import Finished, Progress, Request, SamplingParams, SoundPiece

FAKE = (sys.executable, "-P", str(Path(__file__).parent / "fake_graph_stage.py"))
MakeStage = Callable[[], ProcessStage]


@pytest.fixture
def make_stage() -> MakeStage:
    return lambda: ProcessStage(FAKE)


@pytest.fixture
def two(tmp_path: Path) -> dict[str, Any]:
    """A model of two stages, by its word."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DiaForConditionalGeneration"]}))
    return {"model": str(tmp_path), "split_stages": True}


def request(name: str, prompt: str) -> Request:
    return Request(request_id=name, prompt=prompt, sampling=SamplingParams())


def ask(h: Harness, name: str, prompt: str) -> asyncio.Task[list[Any]]:
    async def go() -> list[Any]:
        return [event async for event in h.orchestrator.generate(request(name, prompt))]

    return asyncio.create_task(go())


def spoken(events: list[Any]) -> list[list[float]]:
    return [samples_of(event)[0].tolist() for event in events if isinstance(event, SoundPiece)]


def pid_of(h: Harness, replica: Replica) -> int:
    assert replica._running is not None
    (stage,) = (stage for stage in h.stages if stage is replica._running.stage)
    assert stage.pid is not None
    return stage.pid


def memory_files(pid: int) -> int:
    """How many parcels a process holds."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(link).startswith("/memfd:polymux")
    return found


@pytest.mark.parametrize("connector", ["shared-memory", "tcp"])
@pytest.mark.parametrize("floats", [1, 100_000])
def test_chunks_come_through_in_order(make_stage: MakeStage, two: dict[str, Any], floats: int, connector: str) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two, stage_connector=connector) as h:
            answers = await asyncio.gather(*(ask(h, str(i), f"chunks {i + 1} floats {floats}") for i in range(6)))
            for i, events in enumerate(answers):
                assert spoken(events) == [[number, floats] for number in range(i + 1)]
                assert [e.step for e in events if isinstance(e, Progress) and e.phase == "denoise"][-1] == i + 1
                last = events[-1]
                assert isinstance(last, Finished)
                assert (last.seeds, last.metrics.steps, last.sample_rate) == ([7], i + 1, 100)
                assert (last.metrics.denoise, last.metrics.decode) == (1.0, 2.0) and last.metrics.total > 0
            assert h.outcomes() == (6, 0, 0, 0)
            assert h.number("polymux:transfer_bytes_total", from_stage="0", to_stage="1") == 21 * 4 * floats
            assert h.number("polymux:transfer_seconds_count", from_stage="0", to_stage="1") == 21
            await until(lambda: not any(replica.legs for replica in h.orchestrator.replicas))
            if connector == "shared-memory":
                source = pid_of(h, h.orchestrator.replicas[0])
                await until(lambda: memory_files(source) == 0)

    run(scenario())


def test_whoever_listens_slowly_holds_up_all_stages(make_stage: MakeStage, two: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two) as h:
            events = h.orchestrator.generate(request("0", "chunks 50 floats 100000"))
            async for event in events:
                if isinstance(event, SoundPiece):
                    break
            await asyncio.sleep(0.3)
            source = h.orchestrator.replicas[0]
            held = memory_files(pid_of(h, source))
            assert 0 < held <= 3
            assert len([e async for e in events if isinstance(e, SoundPiece)]) == 49

    run(scenario())


@pytest.mark.parametrize("how", ["abort", "the second stage fails", "the consumer leaves"])
def test_the_end_of_a_request_reaches_every_stage(make_stage: MakeStage, two: dict[str, Any], how: str) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two) as h:
            if how == "the second stage fails":
                with pytest.raises(GenerationError, match="did not work"):
                    await ask(h, "0", "chunks 1000 floats 100000 fail")
            else:
                task = ask(h, "0", "stall chunks 9 floats 100000")
                await until(lambda: "0" in h.orchestrator.replicas[1].legs)
                if how == "abort":
                    h.orchestrator.abort("0")
                    with pytest.raises(RequestAbortedError):
                        await task
                else:
                    task.cancel()
            await until(lambda: not any(replica.legs for replica in h.orchestrator.replicas))
            await until(lambda: memory_files(pid_of(h, h.orchestrator.replicas[0])) == 0)
            assert spoken(await ask(h, "0", "chunks 2")) == [[0, 1], [1, 1]]  # the id is free again

    run(scenario())


@pytest.mark.parametrize("stage", [0, 1])
def test_the_death_of_any_stage_fails_its_requests(make_stage: MakeStage, two: dict[str, Any], stage: int) -> None:
    async def scenario() -> None:
        shared = set(os.listdir("/dev/shm"))
        async with started(make_stage, **two, restart_stages=True) as h:
            task = ask(h, "0", "stall chunks 9 floats 100000")
            await until(lambda: "0" in h.orchestrator.replicas[1].legs)
            victim, other = h.orchestrator.replicas[stage], h.orchestrator.replicas[1 - stage]
            before = pid_of(h, other)
            os.kill(pid_of(h, victim), signal.SIGKILL)
            async with asyncio.timeout(5):
                with pytest.raises(StageDeadError):
                    await task
            await until(lambda: h.orchestrator.status == "loading")
            await until(lambda: not other.legs)  # it was told, too
            await until(lambda: h.orchestrator.status == "ready")
            assert pid_of(h, other) == before
            await until(lambda: memory_files(pid_of(h, h.orchestrator.replicas[0])) == 0)
            assert spoken(await ask(h, "1", "chunks 2")) == [[0, 1], [1, 1]]
        assert set(os.listdir("/dev/shm")) <= shared

    run(scenario())


@pytest.mark.parametrize("stage", [0, 1])
def test_without_a_stage_there_is_no_model(make_stage: MakeStage, two: dict[str, Any], stage: int) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two) as h:
            os.kill(pid_of(h, h.orchestrator.replicas[stage]), signal.SIGKILL)
            reason = await h.orchestrator.until_dead()
            assert reason is not None and "SIGKILL" in reason.message
            await h.orchestrator.close()
            assert not any(exists(s.pid) for s in h.stages if s.pid is not None)

    run(scenario())


def test_what_the_dead_replica_did_not_read_is_not_kept(make_stage: MakeStage, two: dict[str, Any]) -> None:
    """The first stage has long ended with the request when the second one dies with it."""

    async def scenario() -> None:
        async with started(make_stage, **two, data_parallel_size=2) as h:
            sources, speakers = h.orchestrator.replicas[:2], h.orchestrator.replicas[2:]
            task = ask(h, "0", "chunks 3 floats 100000 hang")
            await until(lambda: any(speaker.legs for speaker in speakers) and not any(s.legs for s in sources))
            (source,) = (s for s in sources if memory_files(pid_of(h, s)))
            (victim,) = (speaker for speaker in speakers if speaker.legs)
            os.kill(pid_of(h, victim), signal.SIGKILL)
            with pytest.raises(StageDeadError):
                await task
            await until(lambda: memory_files(pid_of(h, source)) == 0)
            assert h.orchestrator.status == "ready"
            assert spoken(await ask(h, "1", "chunks 2")) == [[0, 1], [1, 1]]

    run(scenario())


def test_a_stage_that_waits_for_another_one_does_not_hang(make_stage: MakeStage, two: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two, stage_hang_timeout=0.4, restart_stages=True) as h:
            source, speaker = h.orchestrator.replicas
            stalled = ask(h, "0", "stall chunks 9")
            with pytest.raises(StageDeadError):
                await stalled
            await until(lambda: source.phase == "ready")
            restarts = [h.number("polymux:stage_restarts_total", stage=str(i)) for i in range(2)]
            assert restarts == [1, 0]  # it is the first one that owed something
            with pytest.raises(StageDeadError):
                await ask(h, "1", "chunks 9 hang")
            await until(lambda: speaker.phase == "ready")
            assert h.number("polymux:stage_restarts_total", stage="1") == 1

    run(scenario())


def test_all_stages_sleep_and_wake_up(make_stage: MakeStage, two: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two) as h:
            assert await h.orchestrator.sleep(1) == 2000
            assert h.orchestrator.status == "asleep"
            await h.orchestrator.wake_up()
            assert spoken(await ask(h, "1", "chunks 2")) == [[0, 1], [1, 1]]

    run(scenario())


def test_what_has_one_stage_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["VitsModel"]}))
    (tmp_path / "empty").mkdir()
    for model in (str(tmp_path), "demo", str(tmp_path / "empty")):
        with pytest.raises(ConfigError, match="has one stage only") as caught:
            Orchestrator(EngineConfig.from_flat(model=model, split_stages=True))
        assert caught.value.param == "split_stages"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"async_chunk": False}, "acts only with --split-stages"),
        ({"stage_connector": "tcp"}, "acts only with --split-stages"),
        ({"split_stages": True, "connector_host": "::1"}, "acts only with --stage-connector tcp"),
    ],
)
def test_knobs_of_stages_need_stages(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="m", **given)

"""Several replicas of one stage: who gets a request, and what becomes of the others when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import pytest
from orchestrator_harness import LONG, Harness, MakeStage, exists, run, started, until

from polymux.config import EngineConfig
from polymux.errors import ConfigError, NotReadyError, QueueFullError, StageDeadError
from polymux.orchestrator.plan import of_replica
from polymux.orchestrator.replica import Replica
from polymux.request import Finished, OmniDiffusionSamplingParams, Request


def two(**engine_args: Any) -> dict[str, Any]:
    return {"data_parallel_size": 2, "max_num_seqs": 1} | engine_args


def held(h: Harness) -> list[set[str]]:
    return [set(replica.legs) for replica in h.orchestrator.replicas]


def pid_of(h: Harness, replica: Replica) -> int:
    pids = [stage.pid for stage in h.stages if stage is replica._running.stage]  # type: ignore[union-attr]
    assert pids[0] is not None
    return pids[0]


async def occupy(h: Harness, count: int) -> list[asyncio.Task[list[Any]]]:
    tasks = [h.ask(str(i), LONG) for i in range(count)]
    await until(lambda: h.number("polymux:num_requests_running") == len(h.orchestrator.replicas))
    return tasks


def test_a_dead_replica_fails_its_own_requests_only(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two()) as h:
            tasks = await occupy(h, 4)
            first, second = h.orchestrator.replicas
            mine = {name: tasks[int(name)] for name in first.legs}
            os.kill(pid_of(h, first), signal.SIGKILL)
            async with asyncio.timeout(5):
                errors = await asyncio.gather(*mine.values(), return_exceptions=True)
            assert [type(error) for error in errors] == [StageDeadError] * 2
            assert not any(task.done() for name in second.legs for task in [tasks[int(name)]])
            await until(lambda: first.phase == "dead")
            assert h.orchestrator.status == "ready"
            assert (h.number("polymux:stage_ready", replica="0"), h.number("polymux:stage_ready", replica="1")) == (
                0,
                1,
            )
            for name in second.legs:
                h.orchestrator.abort(name)
            assert isinstance((await h.ask("later"))[-1], Finished)
            os.kill(pid_of(h, second), signal.SIGKILL)
            reason = await h.orchestrator.until_dead()
            assert reason is not None and "SIGKILL" in reason.message
            with pytest.raises(NotReadyError, match="is gone"):
                await h.ask("too late")

    run(scenario())


def test_one_that_is_started_again_takes_its_part(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two(restart_stages=True, data_parallel_policy="round-robin")) as h:
            first, _ = h.orchestrator.replicas
            before = pid_of(h, first)
            os.kill(before, signal.SIGKILL)
            await until(lambda: first.phase == "loading")
            assert h.orchestrator.status == "ready"
            assert isinstance((await h.ask("meanwhile"))[-1], Finished)
            await until(lambda: first.phase == "ready")
            assert not exists(before)
            await asyncio.gather(h.ask("a", steps=3), h.ask("b", steps=3))
            labels = [{"replica": str(i)} for i in range(2)]
            assert [h.number("polymux:denoise_steps_total", **label) for label in labels] == [3, 4]
            assert [h.number("polymux:stage_restarts_total", **label) for label in labels] == [1, 0]

    run(scenario())


def test_all_of_them_start_or_none(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        h = Harness(make_stage, **two(model="exit", restart_stages=True))
        with pytest.raises(StageDeadError, match="exit code 3"):
            await h.orchestrator.start()
        assert h.orchestrator.status == "dead"
        assert not any(stage.pid is not None and exists(stage.pid) for stage in h.stages)

    run(scenario())


@pytest.mark.parametrize("policy", ["least-queue-length", "round-robin", "random", "session-affinity"])
def test_requests_are_spread(make_stage: MakeStage, policy: str) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two(max_num_seqs=8, data_parallel_policy=policy)) as h:
            tasks = [h.ask(str(i), LONG, num_outputs_per_prompt=3 if i == 0 else 1) for i in range(6)]
            await asyncio.sleep(0)
            counts = [len(names) for names in held(h)]
            assert sum(counts) == 6
            if policy == "round-robin":
                assert counts == [3, 3]
            elif policy != "random":
                assert [replica.load for replica in h.orchestrator.replicas] == [4, 4]
            for i in range(6):
                h.orchestrator.abort(str(i))
            await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_a_session_stays_where_it_is(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, data_parallel_size=3, data_parallel_policy="session-affinity") as h:
            params = OmniDiffusionSamplingParams(num_inference_steps=LONG)
            where: dict[str, set[int]] = {}

            def place(session: str, number: int) -> int:
                name = f"{session}-{number}"
                h.orchestrator.submit(Request(request_id=name, prompt="a", params=params, session_id=session))
                (index,) = (i for i, names in enumerate(held(h)) if name in names)
                where.setdefault(session, set()).add(index)
                return index

            places = {session: place(session, 0) for session in map(str, range(30))}
            assert all(place(session, 1) == index for session, index in places.items())
            assert len(Counter(places.values())) == 3
            lost = h.orchestrator.replicas[1]
            os.kill(pid_of(h, lost), signal.SIGKILL)
            await until(lambda: lost.phase == "dead")
            moved = {session for session, index in places.items() if place(session, 2) != index}
            assert moved == {session for session, index in places.items() if index == 1}

    run(scenario())


def test_there_is_room_in_each(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two(max_queue=1)) as h:
            tasks = await occupy(h, 3)
            with pytest.raises(
                QueueFullError, match=r"1 running in each of 2 replicas \(--max-num-seqs\) and 1 waiting"
            ):
                await h.ask("3")
            await h.orchestrator.drain(0)
            assert {type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)} == {NotReadyError}

    run(scenario())


def test_all_sleep_and_all_wake_up(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two(restart_stages=True)) as h:
            assert await h.orchestrator.sleep(1) == 2000
            assert [replica.phase for replica in h.orchestrator.replicas] == ["asleep", "asleep"]
            first = h.orchestrator.replicas[0]
            os.kill(pid_of(h, first), signal.SIGKILL)
            await until(lambda: first.phase == "loading")
            await until(lambda: first.phase == "asleep")  # it came, and goes to sleep as the other
            await until(lambda: first.stats.host_memory == 4000)
            assert h.orchestrator.status == "asleep"
            with pytest.raises(NotReadyError, match="asleep"):
                await h.ask("a")
            await h.orchestrator.wake_up()
            assert [replica.phase for replica in h.orchestrator.replicas] == ["ready", "ready"]
            await asyncio.gather(h.ask("a"), h.ask("b"))

    run(scenario())


def test_if_one_refuses_to_sleep_all_stay_awake(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with started(make_stage, **two(model="restless-second")) as h:
            with pytest.raises(ConfigError, match="cannot be moved"):
                await h.orchestrator.sleep(1)
            assert [replica.phase for replica in h.orchestrator.replicas] == ["ready", "ready"]
            await asyncio.gather(h.ask("a"), h.ask("b"))

    run(scenario())


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({}, ["auto:0", "auto:1"]),
        ({"device": "cuda"}, ["cuda:0", "cuda:1"]),
        ({"device": "cpu"}, ["cpu", "cpu"]),
        ({"device": "cuda:3"}, ["cuda:3", "cuda:3"]),
        ({"devices": ("cuda:4,cpu",)}, ["cuda:4", "cpu"]),
        ({"devices": ("cuda:4", "cuda:6")}, ["cuda:4", "cuda:6"]),
    ],
)
def test_each_replica_has_its_device(given: dict[str, Any], devices: list[str]) -> None:
    config = EngineConfig.from_flat(model="m", data_parallel_size=2, **given)
    assert [of_replica(config, i).device.device for i in range(2)] == devices
    assert of_replica(EngineConfig.from_flat(model="m"), 0) == EngineConfig.from_flat(model="m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": ("cpu", "cpu", "cpu")}, "3 devices for 2 replicas"),
        ({"devices": ("cpu", "cpu"), "device": "cpu"}, "exclude each other"),
        ({"data_parallel_size": 1, "data_parallel_policy": "random"}, "acts only with --data-parallel-size"),
        ({"data_parallel_size": 0}, "must be at least 1"),
        ({"data_parallel_policy": "best"}, "allowed are least-queue-length"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="m", **{"data_parallel_size": 2} | given)

"""An orchestrator over real stage processes, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import psutil
from prometheus_client.parser import text_string_to_metric_families

from polymux.config import EngineConfig
from polymux.orchestrator.orchestrator import Orchestrator
from polymux.orchestrator.stage_client import ProcessStage
from polymux.request import OmniDiffusionSamplingParams, Request

Result = TypeVar("Result")
MakeStage = Callable[[], ProcessStage]
LONG = 10**6  # steps; about an hour


class Harness:
    """An orchestrator and the stages that it started."""

    def __init__(self, make_stage: MakeStage, **engine_args: Any) -> None:
        self.stages: list[ProcessStage] = []

        def make() -> ProcessStage:
            self.stages.append(make_stage())
            return self.stages[-1]

        limits = {"max_inference_steps": LONG}
        config = EngineConfig.from_flat(**{"model": "fake"} | limits | engine_args)
        self.orchestrator = Orchestrator(config, make)

    @property
    def pid(self) -> int:
        pid = self.stages[-1].pid
        assert pid is not None
        return pid

    def ask(self, request_id: str, steps: int = 1, prompt: str = "a", **params: Any) -> asyncio.Task[list[Any]]:
        """Start a request; the task gives its events."""
        sampling = OmniDiffusionSamplingParams(num_inference_steps=steps, **params)
        request = Request(request_id=request_id, prompt=prompt, params=sampling)

        async def run() -> list[Any]:
            return [event async for event in self.orchestrator.generate(request)]

        return asyncio.create_task(run())

    async def ask_and_see_it_run(self, request_id: str, steps: int = LONG) -> asyncio.Task[list[Any]]:
        task = self.ask(request_id, steps)
        await until(lambda: self.number("polymux:num_requests_running") > 0)
        return task

    def number(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.orchestrator.metrics.render().decode()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise KeyError(name)

    def outcomes(self) -> tuple[int, ...]:
        names = ("completed", "failed", "aborted", "refused")
        return tuple(int(self.number("polymux:requests_total", outcome=name)) for name in names)


def run(scenario: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(scenario, 60))  # a test that hangs has failed


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


def exists(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@contextlib.asynccontextmanager
async def started(make_stage: MakeStage, **engine_args: Any) -> AsyncGenerator[Harness]:
    harness = Harness(make_stage, **engine_args)
    await harness.orchestrator.start()
    try:
        yield harness
    finally:
        async with asyncio.timeout(20):
            await harness.orchestrator.close()
        assert harness.orchestrator.status == "dead"
        for stage in harness.stages:
            assert stage.pid is not None
            assert not exists(stage.pid)

"""Starting a stage: from nothing to ready, or to an error that says why not, with nothing left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from polymux.config import EngineConfig
from polymux.errors import ConfigError, NotReadyError, PolymuxError, StageDeadError, from_info
from polymux.messages import Fatal, FromStage, Ready, Start, Stats, frame
from polymux.orchestrator.stage_client import StageClient
from polymux.request import Capabilities, StageStats

log = logging.getLogger(__name__)

RESTART_DELAYS_S = (0.0, 2.0, 10.0)  # a device may need a moment to free what a dead process held
UNDEAD_S = 30  # for a killed process; one that waits in the kernel, for a device say, may never end

MakeStage = Callable[[], StageClient]


@dataclass(frozen=True)
class RunningStage:
    """A stage that is ready. `stats` is what it had done by then, which belongs to nobody's request."""

    stage: StageClient
    events: AsyncGenerator[FromStage]
    capabilities: Capabilities
    stats: StageStats


async def launch(make_stage: MakeStage, config: EngineConfig) -> RunningStage:
    """Start a stage and wait until it is ready. Raises what the stage says kept it, or NotReadyError after too long."""
    start = _start_message(config)
    stage, timeout = make_stage(), config.process.stage_init_timeout
    try:
        async with asyncio.timeout(timeout):
            await stage.start()
            stage.send(start)
            return await _until_ready(stage)
    except TimeoutError:
        await destroy(stage)
        raise NotReadyError(f"the model was not ready within {timeout:g} s (--stage-init-timeout)") from None
    except BaseException:
        await destroy(stage)
        raise


async def relaunch(make_stage: MakeStage, config: EngineConfig) -> RunningStage:
    """Launch in place of a stage that has died; tries again a few times."""
    failure: PolymuxError | None = None
    for delay in RESTART_DELAYS_S:
        await asyncio.sleep(delay)
        try:
            return await launch(make_stage, config)
        except PolymuxError as error:
            log.error("the stage did not start again: %s", error)
            failure = error
    assert failure is not None
    raise failure


async def destroy(stage: StageClient) -> None:
    """Returns when nothing of the stage is left, or nothing more can be done about it."""
    stage.kill()
    try:
        async with asyncio.timeout(UNDEAD_S):
            await stage.close()
    except TimeoutError:
        log.error("the stage process was killed %d s ago and is still there", UNDEAD_S)


async def _until_ready(stage: StageClient) -> RunningStage:
    events, stats = stage.events(), StageStats()
    async for message in events:
        match message:
            case Stats(reported):
                stats = reported
            case Ready(capabilities):
                return RunningStage(stage, events, capabilities, stats)
            case Fatal(error):
                raise from_info(error)
            case _:
                raise StageDeadError(f"the stage process sent {type(message).__name__} before it was ready")
    raise StageDeadError("the stage process ended before it was ready")


def _start_message(config: EngineConfig) -> Start:
    start = Start(config)
    try:
        frame(start)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"an argument cannot be sent to the model's process: {error}") from None
    return start

"""One place for a process of a stage, and its life: launched, attended, lost, launched again.

    loading ──> ready ──> dead          when the process dies; with --restart-stages it is loading again
       ^──────────┤
                asleep

Knows the process. What it holds for requests are legs, of which it asks only whether it owes them news.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal, Protocol

from polymux.config import EngineConfig
from polymux.errors import NotReadyError, PolymuxError, StageDeadError, from_info
from polymux.messages import (
    Awake,
    Fatal,
    Profiled,
    Ready,
    Sleep,
    Slept,
    StartProfile,
    Stats,
    StopProfile,
    ToStage,
    WakeUp,
)
from polymux.metrics import Metrics, catalog
from polymux.orchestrator.launch import MakeStage, RunningStage, destroy, launch, relaunch
from polymux.orchestrator.leg import Leg
from polymux.orchestrator.watchdog import Watchdog
from polymux.request import Capabilities, Event, StageStats

log = logging.getLogger(__name__)

Phase = Literal["loading", "ready", "asleep", "dead"]
Question = Sleep | WakeUp | StartProfile | StopProfile
Answer = Slept | Awake | Profiled


class Owner(Protocol):
    """Who hears of what happens to a replica."""

    def came(self, replica: Replica) -> None:
        """Its process is ready: the first one, or one in place of a dead one."""
        ...

    def said(self, replica: Replica, event: Event) -> None: ...

    def lost(self, replica: Replica) -> None:
        """Its process is gone, and all that it held; `phase` says whether another one is started."""
        ...


class Replica:
    """One replica of a stage. `config` is its own: with its device."""

    def __init__(
        self, key: tuple[int, int], config: EngineConfig, make_stage: MakeStage, owner: Owner, metrics: Metrics
    ) -> None:
        """`key`: the numbers of the stage and of the replica."""
        self.stage, self.index = key
        self.config = config
        self.phase: Phase = "loading"
        self.reason: PolymuxError | None = None  # why the last process ended; for the operator, not for clients
        self.capabilities: Capabilities | None = None  # None until it was ready for the first time
        self.stats = StageStats()  # as the present process reported last
        self.legs: dict[str, Leg] = {}  # the requests that its process holds
        self.load = 0  # outputs that it has to make yet
        self.retired = False  # it was told to end: that is no death, and nobody takes its place
        self._make_stage, self._owner, self._metrics = make_stage, owner, metrics
        self._labels = (str(self.stage), str(self.index))
        self._running: RunningStage | None = None
        self._answer: asyncio.Future[Answer] | None = None
        metrics.watch(catalog.READY, lambda: float(self.phase == "ready"), self._labels)

    def __str__(self) -> str:
        return f"stage {self.stage}, replica {self.index}"

    def hold(self, request_id: str, leg: Leg) -> None:
        """Its process has this request."""
        self.legs[request_id] = leg
        self.load += leg.outputs

    def let_go(self, request_id: str) -> None:
        """Its process does not have it any more."""
        leg = self.legs.pop(request_id, None)
        if leg is not None:
            self.load -= leg.outputs

    def send(self, message: ToStage) -> None:
        """Never blocks; without a process it does nothing. Raises PayloadTooLargeError."""
        if self._running is not None:
            self._running.stage.send(message)

    def kill(self) -> None:
        """End its process now. Callable from any thread."""
        if self._running is not None:
            self._running.stage.kill()

    async def close(self) -> None:
        """Ask its process to stop; returns when nothing of it is left."""
        if self._running is not None:
            await self._running.stage.close()

    async def keep(self) -> None:
        """Its life, over as many processes as it takes. Nothing is left when this returns, or is cancelled."""
        start, running = launch, None
        try:
            while self.phase == "loading":
                running = await start(self._make_stage, self.config)
                self._take_over(running)
                self.reason = await self._attend(running)
                self._lose()
                await destroy(running.stage)
                running = None
                if self.phase == "loading":
                    log.error("%s: %s; starting it again", self, self.reason)
                    self._metrics.restarted(self._labels)
                    start = relaunch
        except PolymuxError as error:
            self.reason = error
        except Exception as error:  # a fault of ours; whoever waits must hear of it all the same
            log.exception("%s: the orchestrator cannot go on", self)
            self.reason = PolymuxError(f"internal error: {type(error).__name__}")
        finally:
            self.kill()
            self.retired = True
            self._lose()
            if running is not None:  # also if it was on its way when this was cancelled
                await destroy(running.stage)

    async def ask(self, message: Question) -> Answer:
        """Send to the process, which sleeps or is ready as the question takes it, and wait for its answer. One at a
        time. Raises NotReadyError, StageDeadError."""
        wanted: Phase = "asleep" if isinstance(message, (Sleep, WakeUp)) else "ready"
        if self.phase != wanted or self._running is None:
            raise NotReadyError(f"{self} is not {wanted}")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self.send(message)
        try:
            async with asyncio.timeout(self.config.process.stage_init_timeout):
                return await answer
        except TimeoutError:
            self.kill()
            raise StageDeadError("the model's process did not answer in time (--stage-init-timeout)") from None
        finally:
            self._answer = None

    def _take_over(self, running: RunningStage) -> None:
        self._running, self.capabilities, self.stats = running, running.capabilities, running.stats
        self._metrics.stage_began(running.stats, self._labels)
        self.reason, self.phase = None, "ready"
        self._owner.came(self)

    async def _attend(self, running: RunningStage) -> PolymuxError | None:
        """Returns when the process has ended or hangs, with the reason; None if it was told to end."""
        patience = self.config.process.stage_hang_timeout
        watchdog = Watchdog(patience, lambda: any(leg.owes_news for leg in self.legs.values()))
        pump, hung = asyncio.create_task(self._pump(running, watchdog)), asyncio.create_task(watchdog.until_hung())
        try:
            await asyncio.wait((pump, hung), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                return pump.result()
            return StageDeadError(f"the stage gave no sign of progress for {patience:g} s (--stage-hang-timeout)")
        finally:
            pump.cancel()
            hung.cancel()
            await asyncio.gather(pump, hung, return_exceptions=True)

    async def _pump(self, running: RunningStage, watchdog: Watchdog) -> PolymuxError | None:
        """Hand out what the process says, until it ends. Returns why it ended; None if it was told to."""
        try:
            async for message in running.events:
                watchdog.heard()
                match message:
                    case Stats(stats):
                        self._metrics.stage_reported(stats, self._labels)
                        self.stats = stats
                    case Fatal(error):
                        return from_info(error)
                    case Slept() | Awake() | Profiled():
                        if self._answer is not None and not self._answer.done():
                            self._answer.set_result(message)
                    case Ready():
                        return StageDeadError("the stage process reported ready twice")
                    case event:
                        self._owner.said(self, event)
            death = StageDeadError("the stage process ended by itself")
        except StageDeadError as error:
            death = error
        return None if self.retired else death

    def _lose(self) -> None:
        """There is no process any more: tell everybody who waits for it, at once."""
        again = self.phase in ("ready", "asleep") and self.config.process.restart_stages and not self.retired
        self.phase = "loading" if again else "dead"
        self._running = None
        self._metrics.stage_ended(self._labels)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StageDeadError("the model's process died before it had answered"))
        self._owner.lost(self)

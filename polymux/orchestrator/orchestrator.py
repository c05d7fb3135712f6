"""Owns the stage of a model and the requests that are under way: the one place that knows whether a generation works.

               asleep
                 ↕
    loading ──> ready ──> draining ──> dead
       ^──────────┘ └───────────────────^      when the stage dies; with --restart-stages it is loaded again

Knows neither HTTP nor prompts nor tensors. All of it runs in the event loop of `start`, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Literal

from polymux.config import EngineConfig
from polymux.errors import InvalidRequestError, NotReadyError, PolymuxError, StageDeadError, from_info
from polymux.messages import Abort, Add, Awake, Fatal, Ready, Sleep, Slept, Stats, Taken, WakeUp
from polymux.metrics import Metrics, catalog
from polymux.orchestrator.admission import admit
from polymux.orchestrator.launch import MakeStage, RunningStage, destroy, launch, relaunch
from polymux.orchestrator.stage_client import ProcessStage
from polymux.orchestrator.tickets import Ticket, Tickets
from polymux.orchestrator.watchdog import Watchdog
from polymux.request import Capabilities, Finished, News, OutputChunk, Request, SoundPiece, StageStats

log = logging.getLogger(__name__)

Status = Literal["loading", "ready", "asleep", "draining", "dead"]

_NOT_READY: dict[Status, str] = {
    "loading": "the model is still loading",
    "asleep": "the model is asleep, until wake_up() or a POST to v1/omni/wakeup",
    "draining": "the server is shutting down",
    "dead": "the model's process is gone",
}
_LOADING_AGAIN = "the model's process died, and the model is loading again"


class Orchestrator:
    """Starts once, ends once. `make_stage` makes a stage's client, for every process that is started; `model_name` is
    how clients call the model, if not as the configuration does."""

    def __init__(
        self, config: EngineConfig, make_stage: MakeStage = ProcessStage, *, model_name: str | None = None
    ) -> None:
        self.config = config
        self.metrics = Metrics(model_name or config.model.model)
        self.status: Status = "loading"
        self.reason: PolymuxError | None = None  # why it is dead; for the operator, not for clients
        self.capabilities: Capabilities | None = None  # None until the model was ready for the first time
        self.stats = StageStats()  # as the present process reported last
        self._make_stage = make_stage
        self._tickets = Tickets(self.metrics)
        self._running: RunningStage | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # ready for the first time, or dead
        self._dead = asyncio.Event()
        self._turn = asyncio.Lock()  # one goes to sleep, or wakes up, at a time
        self._answer: asyncio.Future[Slept | Awake] | None = None
        self._naps: set[asyncio.Task[int]] = set()
        self.metrics.watch(catalog.READY, lambda: float(self.status == "ready"))

    async def start(self) -> None:
        """Returns when a generation works. Raises what kept the stage from it; then nothing of it is left."""
        if self._keeper is not None or self._dead.is_set():
            raise RuntimeError("an orchestrator starts once")
        self._keeper = asyncio.create_task(self._keep())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            await self.close()
            raise
        if self.status == "dead":
            await asyncio.wait([self._keeper])
            raise self.reason or NotReadyError(_NOT_READY["dead"])

    def generate(self, request: Request) -> AsyncGenerator[News | Finished]:
        """Progress, previews, parts of the output, the rest of it. The request is sent, or refused, before this
        returns; leaving early aborts it. Raises PolymuxError."""
        return self._follow(self.submit(request))

    async def _follow(self, ticket: Ticket) -> AsyncGenerator[News | Finished]:
        try:
            async with contextlib.aclosing(ticket.events()) as events:
                async for event in events:
                    yield event
                    if isinstance(event, (OutputChunk, SoundPiece)):
                        ticket.unused -= 1
                        if self._running is not None:
                            self._running.stage.send(Taken(event.request_id))
        finally:
            if not ticket.ended:
                self.abort(ticket.request_id)

    def submit(self, request: Request) -> Ticket:
        """Send a request to the stage. Raises NotReadyError, InvalidRequestError, QueueFullError."""
        try:
            running = self.check_ready()
            wait = self._tickets.seconds_until_one_ends()
            admit(request, running.capabilities, self.config, self._tickets.live, wait)
            if request.request_id in self._tickets:
                message = f"request_id={request.request_id!r}: a request with this id is under way"
                raise InvalidRequestError(message, param="request_id")
            running.stage.send(Add(request))
        except PolymuxError:
            self.metrics.count("refused")
            raise
        return self._tickets.open(request.request_id)

    def abort(self, request_id: str) -> bool:
        """End a request for its consumer now and in the stage soon. False if it is unknown or has ended."""
        if not self._tickets.abort(request_id):
            return False
        if self._running is not None:
            self._running.stage.send(Abort(request_id))
        return True

    def check_ready(self) -> RunningStage:
        """Raises NotReadyError unless a generation would work now."""
        if self.status != "ready" or self._running is None:
            again = self.status == "loading" and self.capabilities is not None
            raise NotReadyError(_LOADING_AGAIN if again else _NOT_READY[self.status])
        return self._running

    async def sleep(self, level: int) -> int:
        """Finish what is under way, take nothing new, give the device's memory back: the bytes that others have of it.

        Level 1 keeps the weights on the host, level 2 drops them. Raises InvalidRequestError, NotReadyError, and
        ConfigError if this model cannot.
        """
        if level not in (1, 2):
            what = f"level={level!r}: allowed are 1 (weights to the host) and 2 (weights dropped)"
            raise InvalidRequestError(what, param="level")
        return await self._uninterrupted(self._sleep(level))

    async def wake_up(self) -> None:
        """Returns when a generation works again. Raises NotReadyError, and what loading raises."""
        await self._uninterrupted(self._wake_up())

    async def until_dead(self) -> PolymuxError | None:
        """Returns when no generation will ever work again, with the reason; None after an orderly end."""
        await self._dead.wait()
        return self.reason

    async def drain(self, grace: float) -> None:
        """Take no new requests, give those under way `grace` seconds, stop the stage. Works at any time, and twice."""
        if self._keeper is None:
            self._end()
            return
        try:
            if self.status != "dead":
                self.status = "draining"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._tickets.until_none_live(), grace)
                await self._stop()
        finally:
            self._keeper.cancel()
        await asyncio.wait([self._keeper])

    async def close(self) -> None:
        """Stop now; requests under way end with NotReadyError."""
        await self.drain(0)

    def kill(self) -> None:
        """End the stage's process now. For when the event loop cannot do it: callable from any thread."""
        if self._running is not None:
            self._running.stage.kill()

    async def _uninterrupted(self, nap: Coroutine[None, None, int]) -> int:
        """Whoever asked may leave; what has begun goes on, and the status stays true."""
        task = asyncio.create_task(nap)
        self._naps.add(task)
        task.add_done_callback(self._naps.discard)
        return await asyncio.shield(task)

    async def _sleep(self, level: int) -> int:
        async with self._turn:
            self.check_ready()
            self.status = "asleep"
            await self._tickets.until_none_live()
            answer = await self._ask(Sleep(level))
            if not isinstance(answer, Slept) or answer.error is not None:
                if self.status == "asleep":
                    self.status = "ready"
                raise from_info(answer.error) if answer.error else StageDeadError("the stage process woke up instead")
            return answer.freed

    async def _wake_up(self) -> int:
        async with self._turn:
            if self.status != "ready":
                answer = await self._ask(WakeUp())
                if answer.error is not None:
                    raise from_info(answer.error)
                if self.status == "asleep":
                    self.status = "ready"
            return 0

    async def _ask(self, message: Sleep | WakeUp) -> Slept | Awake:
        """Send to the sleeping stage and wait for its answer. Raises NotReadyError, StageDeadError."""
        if self.status != "asleep" or self._running is None:
            raise NotReadyError(_NOT_READY[self.status])
        self._answer = asyncio.get_running_loop().create_future()
        self._running.stage.send(message)
        try:
            async with asyncio.timeout(self.config.process.stage_init_timeout):
                return await self._answer
        except TimeoutError:
            self.kill()
            raise StageDeadError("the model's process did not answer in time (--stage-init-timeout)") from None
        finally:
            self._answer = None

    async def _stop(self) -> None:
        if self._running is None:
            return
        for request_id in self._tickets.live_ids():
            self._running.stage.send(Abort(request_id))
        self._tickets.fail_all(NotReadyError("shut down before the request was done"))
        await self._running.stage.close()

    async def _keep(self) -> None:
        """The life of the stage, over as many processes as it takes."""
        start, running = launch, None
        try:
            while self.status == "loading":
                running = await start(self._make_stage, self.config)
                self._take_over(running)
                self.reason = await self._attend(running)
                self._lose()
                await destroy(running.stage)
                running = None
                if self.status == "loading":
                    log.error("%s; starting it again", self.reason)
                    self.metrics.restarted()
                    start = relaunch
        except PolymuxError as error:
            self.reason = error
        except Exception as error:  # a fault of ours; whoever waits must hear of it all the same
            log.exception("the orchestrator cannot go on")
            self.reason = PolymuxError(f"internal error: {type(error).__name__}")
        finally:
            self._end()
            if running is not None:  # also if it was on its way when this was cancelled
                await destroy(running.stage)

    def _take_over(self, running: RunningStage) -> None:
        self._running, self.capabilities, self.stats = running, running.capabilities, running.stats
        self.metrics.stage_began(running.stats)
        self.reason = None
        if self.status == "loading":
            self.status = "ready"
        self._settled.set()

    async def _attend(self, running: RunningStage) -> PolymuxError | None:
        """Returns when the stage has ended or hangs, with the reason; None if it was told to end."""
        patience = self.config.process.stage_hang_timeout
        watchdog = Watchdog(patience, lambda: self._tickets.expectant)
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
        """Hand out what the stage says, until it ends. Returns why it ended; None if it was told to."""
        try:
            async for message in running.events:
                watchdog.heard()
                match message:
                    case Stats(stats):
                        self.metrics.stage_reported(stats)
                        self.stats = stats
                    case Fatal(error):
                        return from_info(error)
                    case Slept() | Awake():
                        if self._answer is not None:
                            self._answer.set_result(message)
                    case Ready():
                        return StageDeadError("the stage process reported ready twice")
                    case event:
                        self._tickets.deliver(event)
            death = StageDeadError("the stage process ended by itself")
        except StageDeadError as error:
            death = error
        return None if self.status == "draining" else death

    def _lose(self) -> None:
        """The stage is gone: tell everybody who waits for it, at once."""
        again = self.status in ("ready", "asleep") and self.config.process.restart_stages
        self.status = "loading" if again else "dead"
        self._running = None
        self.metrics.stage_ended()
        self._tickets.fail_all(StageDeadError("the model's process died while it held the request"))
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StageDeadError("the model's process died on its way to sleep or from it"))

    def _end(self) -> None:
        self.kill()
        self._lose()
        self.status = "dead"
        self._settled.set()
        self._dead.set()

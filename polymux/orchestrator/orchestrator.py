"""Owns the stages of a model: the one place that knows whether a generation works.

               asleep
                 ↕
    loading ──> ready ──> draining ──> dead
       ^──────────┘ └───────────────────^      when the last replica of a stage dies; with --restart-stages it is loaded
                                               again

Knows neither HTTP nor prompts nor tensors. All of it runs in the event loop of `start`, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Literal

from polymux.config import EngineConfig
from polymux.errors import InvalidRequestError, NotReadyError, PolymuxError, StageDeadError, from_info
from polymux.messages import Profiled, Sleep, Slept, StartProfile, StopProfile, WakeUp
from polymux.metrics import Metrics
from polymux.orchestrator.admission import admit, room
from polymux.orchestrator.balance import Pool
from polymux.orchestrator.defaults import check_defaults, described, with_defaults
from polymux.orchestrator.launch import MakeStage
from polymux.orchestrator.plan import of_replica, plan_of
from polymux.orchestrator.replica import Replica
from polymux.orchestrator.router import Router
from polymux.orchestrator.stage_client import ProcessStage
from polymux.orchestrator.tickets import Ticket, Tickets
from polymux.request import Capabilities, Event, Finished, News, OutputChunk, Request, SoundPiece
from polymux.spelling import shown

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
        self.plan = plan_of(config)
        keys = [(stage, index) for stage, one in enumerate(self.plan) for index in range(one.replicas)]
        labels = [(str(stage), str(index)) for stage, index in keys]
        self.metrics = Metrics(model_name or config.model.model, labels)
        self.reason: PolymuxError | None = None  # why it is dead; for the operator, not for clients
        places = [(key, of_replica(self.plan[key[0]].config, key[1])) for key in keys]
        self.replicas = [Replica(key, own, make_stage, self, self.metrics) for key, own in places]
        self._stages = [
            Pool([r for r in self.replicas if r.stage == stage], one.config.replicas.data_parallel_policy)
            for stage, one in enumerate(self.plan)
        ]
        self._tickets = Tickets(self.metrics)
        self._router = Router(self._stages, self._tickets, self.metrics)
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # ready for the first time, or dead
        self._dead = asyncio.Event()
        self._draining = False
        self._turn = asyncio.Lock()  # one goes to sleep, or wakes up, at a time
        self._level = 0  # at which it sleeps
        self._naps: set[asyncio.Task[int]] = set()

    @property
    def status(self) -> Status:
        if self._dead.is_set():
            return "dead"
        if self._draining:
            return "draining"
        phases = {stage.phase for stage in self._stages}
        if not self._settled.is_set() and "dead" not in phases:
            return "loading"
        worst: tuple[Status, ...] = ("dead", "loading", "asleep")
        return next((status for status in worst if status in phases), "ready")

    @property
    def room(self) -> int:
        """How many requests there may be at once, running and waiting."""
        return room(self.plan[0].config)

    @property
    def capabilities(self) -> Capabilities | None:
        """None until the model was ready for the first time."""
        found = next((r.capabilities for r in self._stages[0].replicas if r.capabilities is not None), None)
        return None if found is None else described(found, self.plan[0].defaults)

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
        try:
            check_defaults(self.plan[0].defaults, self.capabilities, self.config.limits)
        except PolymuxError:
            await self.close()
            raise

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
                        self._router.used(ticket)
        finally:
            if not ticket.ended:
                self.abort(ticket.request_id)

    def submit(self, request: Request) -> Ticket:
        """Send a request to the first stage. Raises NotReadyError, InvalidRequestError, QueueFullError."""
        try:
            self.check_ready()
            capabilities, wait = self.capabilities, self._tickets.seconds_until_one_ends()
            assert capabilities is not None  # it is ready
            request = with_defaults(request, self.plan[0].defaults, capabilities)
            admit(request, capabilities, self.plan[0].config, self._tickets.live, wait)
            if request.request_id in self._tickets:
                message = f"request_id={request.request_id!r}: a request with this id is under way"
                raise InvalidRequestError(message, param="request_id")
            return self._router.begin(request)
        except PolymuxError:
            self.metrics.count("refused")
            raise

    def abort(self, request_id: str) -> bool:
        """End a request for its consumer now and in the stages soon. False if it is unknown or has ended."""
        return self._router.abort(request_id)

    def check_ready(self) -> None:
        """Raises NotReadyError unless a generation would work now."""
        status = self.status
        if status != "ready":
            again = status == "loading" and self._settled.is_set()
            raise NotReadyError(_LOADING_AGAIN if again else _NOT_READY[status])

    async def sleep(self, level: int) -> int:
        """Finish what is under way, take nothing new, give the device's memory back: the bytes that others have of it.

        Level 1 keeps the weights on the host, level 2 drops them. Raises InvalidRequestError, NotReadyError, and
        ConfigError if this model cannot.
        """
        if level not in (1, 2):
            what = f"level={shown(level)}: allowed are 1 (weights to the host) and 2 (weights dropped)"
            raise InvalidRequestError(what, param="level")
        return await self._uninterrupted(self._sleep(level))

    async def wake_up(self) -> None:
        """Returns when a generation works again. Raises NotReadyError, and what loading raises."""
        await self._uninterrupted(self._wake_up())

    async def profile(self, message: StartProfile | StopProfile) -> list[str]:
        """Of every process that is there now: the files of the traces that were written. Raises NotReadyError, and what
        the first process that refuses says."""
        async with self._turn:
            self.check_ready()
            ready = [replica for replica in self.replicas if replica.phase == "ready"]
            answers = await asyncio.gather(*(replica.ask(message) for replica in ready), return_exceptions=True)
        files = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            if not isinstance(answer, Profiled) or answer.error is not None:
                raise from_info(answer.error) if answer.error else NotReadyError("the process answered something else")
            files += [answer.file] if answer.file else []
        return files

    async def until_dead(self) -> PolymuxError | None:
        """Returns when no generation will ever work again, with the reason; None after an orderly end."""
        await self._dead.wait()
        return self.reason

    async def drain(self, grace: float) -> None:
        """Take no new requests, give those under way `grace` seconds, stop the stages. Works at any time, and twice."""
        if self._keeper is None:
            self._end()
            return
        try:
            if not self._dead.is_set():
                self._draining = True
                for replica in self.replicas:
                    replica.retired = True
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
        """End the stages' processes now. For when the event loop cannot do it: callable from any thread."""
        for replica in self.replicas:
            replica.kill()

    # What replicas tell; see `replica.Owner`.

    def came(self, replica: Replica) -> None:
        others = [other for other in self.replicas if other is not replica]
        if self._level and any(other.phase == "asleep" for other in others):
            replica.phase = "asleep"  # as the others; it must not keep memory that was given away
            self._begin(self._put_down(replica))
        if all(other.phase != "loading" for other in self.replicas):
            self._settled.set()

    def said(self, replica: Replica, event: Event) -> None:
        self._router.said(replica, event)

    def lost(self, replica: Replica) -> None:
        self._router.lost(replica)

    # Sleep: all replicas at once. One that has died wakes up with the others, if it is started again.

    def _begin(self, nap: Coroutine[None, None, int]) -> asyncio.Task[int]:
        task = asyncio.create_task(nap)
        self._naps.add(task)
        task.add_done_callback(self._naps.discard)
        return task

    async def _uninterrupted(self, nap: Coroutine[None, None, int]) -> int:
        """Whoever asked may leave; what has begun goes on, and the status stays true."""
        return await asyncio.shield(self._begin(nap))

    async def _sleep(self, level: int) -> int:
        async with self._turn:
            self.check_ready()
            self._level = level  # also of those that come meanwhile
            awake = [replica for replica in self.replicas if replica.phase == "ready"]
            for replica in awake:
                replica.phase = "asleep"
            await self._tickets.until_none_live()
            if self._draining:
                raise NotReadyError(_NOT_READY["draining"])
            awake = [replica for replica in awake if replica.phase == "asleep"]  # others have died meanwhile
            if not awake:
                self._level = 0
                raise StageDeadError("the model's process died on its way to sleep")
            answers = await asyncio.gather(*(_asleep(replica, level) for replica in awake), return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, BaseException)]
            if refusals:
                down = [r for r, answer in zip(awake, answers, strict=True) if isinstance(answer, int)]
                self._level = 0
                await asyncio.gather(*map(_awake, down), return_exceptions=True)
                raise refusals[0]
            return sum(answer for answer in answers if isinstance(answer, int))

    async def _wake_up(self) -> int:
        async with self._turn:
            self._level = 0
            asleep = [replica for replica in self.replicas if replica.phase == "asleep"]
            if not asleep:
                self.check_ready()
            answers = await asyncio.gather(*map(_awake, asleep), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            return 0

    async def _put_down(self, replica: Replica) -> int:
        """One that came while the others sleep."""
        async with self._turn:
            if replica.phase == "asleep":
                if not self._level:
                    replica.phase = "ready"
                    return 0
                with contextlib.suppress(PolymuxError):
                    return await _asleep(replica, self._level)
            return 0

    # The life of it all.

    async def _stop(self) -> None:
        self._router.abort_all(NotReadyError("shut down before the request was done"))
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _keep(self) -> None:
        """Until a stage has no replica any more, or one did not start at first."""
        lives = {asyncio.create_task(replica.keep()): replica for replica in self.replicas}
        try:
            waiting = set(lives)
            while waiting:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not self._settled.is_set() or any(stage.phase == "dead" for stage in self._stages):
                    self.reason = next((lives[life].reason for life in ended), None)
                    break
        finally:
            self._end()
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    def _end(self) -> None:
        self.kill()
        self._dead.set()
        self._tickets.fail_all(StageDeadError("the model's process died while it held the request"))
        self._settled.set()


async def _asleep(replica: Replica, level: int) -> int:
    """Put it to sleep; the bytes. It is ready again if it refuses, which is raised."""
    answer = await replica.ask(Sleep(level))
    if not isinstance(answer, Slept) or answer.error is not None:
        if replica.phase == "asleep":
            replica.phase = "ready"
        raise from_info(answer.error) if answer.error else NotReadyError("the stage process woke up instead")
    return answer.freed


async def _awake(replica: Replica) -> None:
    answer = await replica.ask(WakeUp())
    if answer.error is not None:
        raise from_info(answer.error)
    if replica.phase == "asleep":
        replica.phase = "ready"

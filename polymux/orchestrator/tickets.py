"""The requests that are under way: what each consumer waits for, and how each one ended.

Knows events, not where they come from. Of the stages, only how many still hold a request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from polymux.errors import PolymuxError, RequestAbortedError
from polymux.metrics import Metrics, Outcome, catalog
from polymux.metrics.streams import Stream
from polymux.orchestrator.leg import Leg
from polymux.request import Finished, News, OutputChunk, Progress, Request

RECENT = 32  # requests


class Ticket:
    """One request under way. Iterating gives what happens to it, and then its output; an end without output raises."""

    def __init__(self, request: Request) -> None:
        self.request, self.request_id = request, request.request_id
        self.admitted = time.monotonic()
        self.stream = Stream(self.admitted)
        self.started_at: float | None = None  # the stage works on it
        self.ended = False  # the consumer has its answer; the stage may still have to let go
        self.begun: list[OutputChunk] = []  # of each array that comes in parts, what it is, without the rows
        self.legs: dict[int, Leg] = {}  # by stage, as long as the stage holds it
        self.past: dict[int, Leg] = {}  # by stage, of those that have let go of it, and may hold what they handed on
        self.reached = 0  # the furthest stage that it has come to
        self.done: dict[int, Finished] = {}  # by stage, what those said at their end that have ended
        self._events: asyncio.Queue[News | Finished | PolymuxError] = asyncio.Queue()

    @property
    def started(self) -> bool:
        return self.started_at is not None

    def put(self, event: News | Finished | PolymuxError) -> None:
        if isinstance(event, OutputChunk) and event.start == 0:
            self.begun.append(replace(event, rows=replace(event.rows, data=b"")))
        self._events.put_nowait(event)

    async def events(self) -> AsyncGenerator[News | Finished]:
        while True:
            event = await self._events.get()
            if isinstance(event, PolymuxError):
                raise event
            yield event
            if isinstance(event, Finished):
                return


class Tickets:
    """All requests under way, by id. One that has ended stays until every stage has let go of it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tickets: dict[str, Ticket] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds that the last ones ran
        self._none_live = asyncio.Event()
        self._none_live.set()
        metrics.watch(catalog.RUNNING, lambda: self.running)
        metrics.watch(catalog.WAITING, lambda: self.waiting)

    def __len__(self) -> int:
        """Requests that stages hold."""
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    @property
    def live(self) -> int:
        """Requests whose consumer still waits."""
        return len(self.live_ids())

    @property
    def running(self) -> int:
        return sum(ticket.started for ticket in self._tickets.values())

    @property
    def waiting(self) -> int:
        return sum(not (ticket.started or ticket.ended) for ticket in self._tickets.values())

    def seconds_until_one_ends(self) -> float:
        """An estimate, from how long the last ones ran and how old those are that run. 0: nothing is known."""
        now = time.monotonic()
        ages = [now - ticket.started_at for ticket in self._tickets.values() if ticket.started_at is not None]
        means = [sum(seconds) / len(seconds) for seconds in (self._recent, ages) if seconds]
        return max(means, default=0.0) / max(len(ages), 1)

    def open(self, request: Request) -> Ticket:
        ticket = self._tickets[request.request_id] = Ticket(request)
        self._none_live.clear()
        return ticket

    def get(self, request_id: str) -> Ticket | None:
        return self._tickets.get(request_id)

    def deliver(self, ticket: Ticket, event: News) -> None:
        """Hand an event to whom it concerns."""
        if not ticket.started and not (isinstance(event, Progress) and event.phase == "queued"):
            ticket.started_at = time.monotonic()
        if not ticket.ended:
            self._metrics.streams.came(ticket.stream, event, time.monotonic())
            ticket.put(event)

    def abort(self, request_id: str) -> bool:
        """End a request for its consumer. False if there is no such request, or it has ended."""
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.ended:
            return False
        self.end(ticket, RequestAbortedError(f"request {request_id} was aborted"))
        return True

    def live_ids(self) -> list[str]:
        return [ticket.request_id for ticket in self._tickets.values() if not ticket.ended]

    def fail_all(self, error: PolymuxError) -> None:
        """No stage will go on."""
        for ticket in list(self._tickets.values()):
            self.fail(ticket, error)
            ticket.legs.clear()
            self.release(ticket)

    def fail(self, ticket: Ticket, error: PolymuxError) -> None:
        """End a request with an error like this: each has its own, since a raised one collects tracebacks."""
        self.end(ticket, type(error)(error.message, param=error.param))

    def end(self, ticket: Ticket, how: Finished | PolymuxError) -> None:
        """The consumer has its answer. Only the first one counts."""
        if ticket.ended:
            return
        ticket.ended = True
        ticket.put(how)
        if isinstance(how, Finished):
            now = time.monotonic()
            self._recent.append(now - (ticket.started_at or now))
            self._metrics.finished(how, now - ticket.admitted, ticket.begun)
            self._metrics.streams.finished(ticket.stream, now - ticket.admitted)
        else:
            self._metrics.count(outcome_of(how))
        if self.live == 0:
            self._none_live.set()

    def release(self, ticket: Ticket) -> None:
        """A stage has let go of it: it is forgotten if that was the last one."""
        if not ticket.legs:
            self._tickets.pop(ticket.request_id, None)

    async def until_none_live(self) -> None:
        await self._none_live.wait()


def outcome_of(error: PolymuxError) -> Outcome:
    """Under which outcome an error is counted. What only the pipeline could refuse is refused, too."""
    if isinstance(error, RequestAbortedError):
        return "aborted"
    return "refused" if error.status < 500 else "failed"

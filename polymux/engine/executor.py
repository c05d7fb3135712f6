"""An engine on several ranks: rank 0's engine, and what it takes for the others to do the same.

Every rank has the same requests and runs the same sessions from the same seeds. Rank 0 decides: which requests there
are, which are aborted, which calls run together. That is told once per step, before and after the sessions have come to
their next calls; what is computed is exchanged where it is computed. Outputs are rank 0's alone. Knows neither how
processes are started nor what is divided among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from polymux.engine.base import StageEngine
from polymux.engine.followers import Followers
from polymux.engine.rank_messages import Tick, Warm
from polymux.engine.seeds import with_seed
from polymux.errors import PolymuxError, from_info
from polymux.messages import Abort, Add, Sleep, WakeUp
from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Failed, Request, StageStats

LOSS_S = 2.0


class LeadingEngine(StageEngine, Protocol):
    """What rank 0 does its work with."""

    asleep: int  # the level

    @property
    def working(self) -> bool:
        """Whether a session is open, or is to be opened."""
        ...

    def warm_up(self, through: StageEngine | None = None) -> None: ...


class Lead(Protocol):
    """Tells the others which calls run, while they wait for it."""

    telling: bool


class Executor:
    """Implements `engine.base.StageEngine`."""

    def __init__(self, engine: LeadingEngine, lead: Lead, followers: Followers) -> None:
        self.engine, self._lead, self._followers = engine, lead, followers
        self._orders: list[Add | Abort] = []  # that the others have not heard of

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def stats(self) -> StageStats:
        return self.engine.stats

    @property
    def busy(self) -> bool:
        return self.engine.busy or bool(self._orders)

    def warm_up(self) -> None:
        self.engine.warm_up(through=self)
        self._followers.tell(Warm())

    def add(self, request: Request) -> None:
        seeded = with_seed(request)
        self.engine.add(seeded)
        self._orders.append(Add(seeded))

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._orders.append(Abort(request_id))

    def taken(self, request_id: str) -> None:
        self.engine.taken(request_id)

    def feed(self, chunk: Chunk) -> None:
        self.engine.feed(chunk)

    def step(self) -> list[Event]:
        self._lead.telling = bool(self._orders) or self.engine.working
        if self._lead.telling:
            orders, self._orders = self._orders, []
            self._followers.tell(Tick(orders))
        try:
            events = self.engine.step()
        except Exception:
            # If a rank is lost, that is the reason, and whoever watches it ends this process meanwhile.
            time.sleep(LOSS_S)
            raise
        # Also what has failed here alone, on its way out.
        self._orders += [Abort(event.request_id) for event in events if isinstance(event, Failed)]
        return events

    def sleep(self, level: int) -> int:
        return self._everywhere(Sleep(level), lambda: self.engine.sleep(level), WakeUp(), self.engine.wake_up)

    def wake_up(self) -> None:
        level = self.engine.asleep
        self._everywhere(WakeUp(), self.engine.wake_up, Sleep(level), lambda: self.engine.sleep(level))

    def close(self) -> None:
        self._followers.close()
        self.engine.close()

    def _everywhere(
        self,
        message: Sleep | WakeUp,
        here: Callable[[], int | None],
        back: Sleep | WakeUp,
        back_here: Callable[[], object],
    ) -> int:
        """On all ranks or on none: the bytes that others have of it. Raises the first error, when all is as before."""
        while self._orders:
            self.step()
        self._followers.tell(message)
        freed, problem = 0, None
        try:
            freed = here() or 0
        except PolymuxError as error:
            problem = error
        answers = self._followers.answers()
        errors = [from_info(answer.error) for answer in answers if answer.error is not None]
        if problem is None and not errors:
            return freed + sum(answer.freed for answer in answers)
        self._followers.tell(back)
        if problem is None:
            back_here()
        self._followers.answers()
        raise problem or errors[0]

"""The interface of a stage engine: add, abort, step.

An engine runs one stage of a model on one device. It is single-threaded and knows neither processes nor HTTP.
"""

from __future__ import annotations

from typing import Protocol

from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Request, StageStats


class StageEngine(Protocol):
    """Runs requests. `step` does a bounded piece of work and returns what happened."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def stats(self) -> StageStats: ...

    @property
    def busy(self) -> bool:
        """True while some request is running or waiting, or its end is not reported yet."""
        ...

    def warm_up(self) -> None:
        """Make one small real generation, so that the first request finds everything in place."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError; then the engine holds nothing of it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at its next component call; a later `step` reports it as Failed. Unknown ids are no error."""
        ...

    def taken(self, request_id: str) -> None:
        """A chunk of this request's output is used up, and another may come. Unknown ids are no error."""
        ...

    def feed(self, chunk: Chunk) -> None:
        """What the stage before hands on, of a request that was added. Unknown ids are no error."""
        ...

    def step(self) -> list[Event]: ...

    def sleep(self, level: int) -> int:
        """Give the device's memory back, when not busy; the bytes that others have of it. Level 1 keeps the weights on
        the host, level 2 drops them. Raises ConfigError, with everything in place, if it cannot."""
        ...

    def wake_up(self) -> None:
        """Have the weights in place again. Raises what loading raises; then the engine still sleeps."""
        ...

    def close(self) -> None: ...

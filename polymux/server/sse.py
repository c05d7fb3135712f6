"""Server-sent events: an answer that goes out piece by piece, as JSON objects.

The status is only decided when the source has given its first item: what goes wrong before that is an ordinary error
answer; what goes wrong later is the stream's last event. Knows neither what is streamed nor whether the client is still
there: the source ends by itself when it is not (`generation.while_connected`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polymux.errors import PolymuxError, RequestAbortedError
from polymux.server.errors import error_body
from polymux.server.protocol import ErrorDetail

MEDIA_TYPE = "text/event-stream"
_EVENT = {  # each of the stream; OpenAPI has no better place for it
    "type": "object",
    "description": "an event, with stream; see docs/server.md",
    "properties": {
        "event": {"type": "string", "description": "the type of what is in data, where that has one"},
        "data": {"type": "string", "description": "a JSON object, or [DONE]"},
    },
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {"schema": _EVENT}}}}  # for documentation
HEARTBEAT_S = 15.0  # proxies commonly close what is silent for a minute, some after thirty seconds
COMMENT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
LAST = {"type": "http.response.body", "body": b"", "more_body": False}


class StreamEvent(BaseModel):
    """An event with a name of its own: that is its `type`, and goes out as the `event:` line too."""

    type: str


class ErrorEvent(StreamEvent):
    """The last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: ErrorDetail


Events = AsyncGenerator[BaseModel | None]  # None: nothing to tell, but there is no error up to here


async def stream(events: Events, *, done: bool = False, heartbeat_s: float = HEARTBEAT_S) -> Response:
    """The answer, once the first item is there. Raises what `events` raises before it.

    `done`: a stream that ends well ends with "[DONE]", as some of OpenAI's do.
    """
    first = await anext(events, None)
    return EventStream(first, events, done, heartbeat_s)


class EventStream(Response):
    """Sends `first`, then what `events` gives; closes `events`, however it ends."""

    media_type = MEDIA_TYPE

    def __init__(self, first: BaseModel | None, events: Events, done: bool, heartbeat_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events, self._done, self._heartbeat_s = first, events, done, heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self._pieces(scope.setdefault("state", {}))) as pieces:
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception:
                await send(LAST)
                raise  # for the log
            await send(LAST)

    async def _pieces(self, state: dict[str, Any]) -> AsyncGenerator[bytes]:
        """What goes over the wire. Raises what was not raised on purpose, after telling the client.

        `state` of the request: `ended` tells the log of an end that the status no longer can.
        """
        try:
            if self._first is not None:
                yield encoded(self._first)
            async with contextlib.aclosing(pulsing(self._events, self._heartbeat_s)) as pieces:
                async for piece in pieces:
                    yield piece
            if self._done:
                yield DONE
        except PolymuxError as error:
            state["ended"] = error.code
            if not isinstance(error, RequestAbortedError):  # of that, nobody is there to read
                yield encoded(ErrorEvent(error=error_body(error).error))
        except Exception:
            unexpected = PolymuxError("internal error")
            state["ended"] = unexpected.code
            yield encoded(ErrorEvent(error=error_body(unexpected).error))
            raise


async def pulsing(events: Events, seconds: float) -> AsyncGenerator[bytes]:
    """`events`, encoded, and a comment whenever there was nothing to send for some seconds."""
    clock = asyncio.get_running_loop().time
    silent_since = clock()
    item: asyncio.Future[BaseModel | Literal["end"] | None] | None = None
    try:
        while True:
            item = item or asyncio.ensure_future(anext(events, "end"))
            await asyncio.wait((item,), timeout=max(silent_since + seconds - clock(), 0))
            event = None
            if item.done():
                event = item.result()
                item = None
            if event == "end":
                return
            if event is not None:
                yield encoded(event)
                silent_since = clock()
            elif clock() >= silent_since + seconds:
                yield COMMENT
                silent_since = clock()
    finally:
        if item is not None:
            item.cancel()
            await asyncio.gather(item, return_exceptions=True)


def encoded(event: BaseModel) -> bytes:
    """As it goes over the wire."""
    name = f"event: {event.type}\n" if isinstance(event, StreamEvent) else ""
    return f"{name}data: {event.model_dump_json()}\n\n".encode()

"""Server-sent events: what goes over the wire, how a stream ends, and that its source always ends with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from polymux.errors import GenerationError, InvalidRequestError, RequestAbortedError
from polymux.server.sse import COMMENT, Events, StreamEvent, stream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Count(StreamEvent):
    type: Literal["count"] = "count"
    number: int


class Chunk(BaseModel):
    text: str


class Source:
    """Gives its items; an exception among them is raised, a number is a time to wait."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.closed = False

    async def __call__(self) -> Events:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    yield item
        finally:
            self.closed = True


async def never() -> Any:
    raise AssertionError("a stream does not listen")


class Wire:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages[1:])

    @property
    def complete(self) -> bool:
        return self.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def sent(source: Source, **options: Any) -> Wire:
    wire = Wire()
    response = await stream(source(), **options)
    await response({"type": "http", "state": wire.state}, never, wire)
    assert source.closed
    return wire


async def test_events_go_out_one_by_one() -> None:
    wire = await sent(Source(Count(number=1), None, Count(number=2)))
    start, *bodies = wire.messages
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert b"content-length" not in headers
    assert [m["body"] for m in bodies] == [
        b'event: count\ndata: {"type":"count","number":1}\n\n',
        b'event: count\ndata: {"type":"count","number":2}\n\n',
        b"",
    ]
    assert wire.complete


async def test_events_without_a_type_have_no_name_and_a_stream_may_end_with_done() -> None:
    wire = await sent(Source(Chunk(text="a\n\nb")), done=True)
    assert wire.body == b'data: {"text":"a\\n\\nb"}\n\ndata: [DONE]\n\n'


async def test_an_error_before_the_first_event_is_an_ordinary_one() -> None:
    source = Source(InvalidRequestError("no"))
    with pytest.raises(InvalidRequestError):
        await stream(source())
    assert source.closed


@pytest.mark.parametrize("before", [None, Count(number=1)])
async def test_a_later_error_is_the_last_event(before: Count | None) -> None:
    wire = await sent(Source(before, GenerationError("the model failed in '/a/secret.py'", param="x")), done=True)
    *_, last = wire.body.strip().split(b"\n\n")
    name, data = last.split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {
            "message": "the model failed in '...'",
            "type": "server_error",
            "param": "x",
            "code": "generation_failed",
        },
    }
    assert wire.complete
    assert wire.state == {"ended": "generation_failed"}


async def test_a_fault_of_ours_is_told_without_its_words_and_goes_to_the_log() -> None:
    source, wire = Source(None, KeyError("secret")), Wire()
    response = await stream(source())
    with pytest.raises(KeyError):
        await response({"type": "http"}, never, wire)
    assert b"internal error" in wire.body and b"secret" not in wire.body
    assert wire.complete and source.closed


async def test_nobody_is_told_that_the_client_left() -> None:
    wire = await sent(Source(Count(number=1), RequestAbortedError("the client left")), done=True)
    assert wire.body == b'event: count\ndata: {"type":"count","number":1}\n\n'
    assert wire.state == {"ended": "request_aborted"}


async def test_silence_is_broken_by_comments() -> None:
    """Items that tell the client nothing do not count as something said."""
    wire = await sent(Source(None, *[0.04, None] * 10, Count(number=1)), heartbeat_s=0.1)
    assert wire.body.count(COMMENT) >= 2
    assert wire.body.endswith(b'event: count\ndata: {"type":"count","number":1}\n\n')


@pytest.mark.parametrize("messages", [0, 1, 2])
async def test_a_connection_that_breaks_closes_the_source(messages: int) -> None:
    class Broken(Wire):
        async def __call__(self, message: Any) -> None:
            await super().__call__(message)
            if len(self.messages) > messages:
                raise OSError("broken pipe")

    source = Source(Count(number=1), Count(number=2), 60.0)
    response = await stream(source())
    with pytest.raises(OSError, match="broken"):
        await response({"type": "http"}, never, Broken())
    assert source.closed


async def test_cancelling_the_server_task_closes_the_source() -> None:
    source, wire = Source(Count(number=1), 60.0), Wire()
    response = await stream(source())
    before = asyncio.all_tasks()
    task = asyncio.create_task(response({"type": "http"}, never, wire))
    while len(wire.messages) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed
    assert asyncio.all_tasks() <= before


async def test_a_stream_without_events_is_empty() -> None:
    async def nothing() -> AsyncGenerator[BaseModel | None]:
        return
        yield

    wire = Wire()
    await (await stream(nothing()))({"type": "http"}, never, wire)
    assert wire.body == b"" and wire.complete

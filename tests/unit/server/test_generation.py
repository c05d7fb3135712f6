"""A generation ends when its client leaves, and nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from fake_omni import CAPABILITIES, FakeOmni

from polymux.server.app import build_app
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"
BODY = json.dumps({"prompt": "a", "seed": 1}).encode()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Connection:
    """One HTTP request as an ASGI server shows it."""

    def __init__(self, body: bytes = BODY, headers: dict[str, str] | None = None, path: str = IMAGES) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
            "headers": [(b"content-type", b"application/json")]
            + [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


@contextlib.asynccontextmanager
async def serving(omni: FakeOmni, connection: Connection, media: Any = None) -> AsyncIterator[asyncio.Task[None]]:
    state = ServerState(omni, ServerConfig())
    state.media = media or state.media
    app: Any = build_app(state)
    before = asyncio.all_tasks()
    task = asyncio.create_task(app(connection.scope, connection.incoming.get, connection.send))
    yield task
    await asyncio.wait_for(task, 5)
    assert asyncio.all_tasks() <= before  # no watcher is left behind


async def test_leaving_aborts() -> None:
    omni, connection = FakeOmni(), Connection()
    omni.hold.clear()
    async with serving(omni, connection):
        await omni.started.wait()
        connection.leave()
    assert omni.aborted == [omni.requests[0].request_id]


async def test_leaving_while_the_body_is_sent_starts_nothing() -> None:
    omni, connection = FakeOmni(), Connection()
    connection.incoming.get_nowait()
    connection.incoming.put_nowait({"type": "http.request", "body": BODY[:5], "more_body": True})
    connection.leave()
    async with serving(omni, connection):
        pass
    assert omni.requests == []
    assert connection.sent == []


async def test_staying_gives_the_answer() -> None:
    omni, connection = FakeOmni(), Connection()
    omni.hold.clear()
    async with serving(omni, connection) as task:
        await omni.started.wait()
        assert not task.done()
        omni.hold.set()
    assert connection.status == 200
    assert omni.aborted == []


async def test_cancelling_the_server_task_aborts_too() -> None:
    omni, connection = FakeOmni(), Connection()
    omni.hold.clear()
    with pytest.raises(asyncio.CancelledError):
        async with serving(omni, connection) as task:
            await omni.started.wait()
            task.cancel()
    assert len(omni.aborted) == 1


class SlowMedia:
    """Stands in for the loader: what it is asked for never comes."""

    def __init__(self) -> None:
        self.asked, self.ended = asyncio.Event(), asyncio.Event()

    async def image(self, source: str, *, param: str) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


WITH_PICTURE = {
    "/v1/images/edits": {"prompt": "a", "image": "http://example.org/"},
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.org/"}}]},
        ]
    },
}


@pytest.mark.parametrize("path", WITH_PICTURE)
async def test_leaving_ends_the_fetch_of_a_picture(path: str) -> None:
    omni, media = FakeOmni(), SlowMedia()
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, media={"image": 1})
    connection = Connection(json.dumps(WITH_PICTURE[path]).encode(), path=path)
    async with serving(omni, connection, media):
        await media.asked.wait()
        connection.leave()
    assert media.ended.is_set()
    assert omni.requests == []
    sample = {"model_name": "fake/model", "outcome": "aborted"}
    assert omni.metrics.registry.get_sample_value("polymux:requests_total", sample) == 1


@pytest.mark.parametrize("path", WITH_PICTURE)
async def test_the_time_of_a_request_holds_for_the_fetch_of_a_picture(path: str) -> None:
    omni, media = FakeOmni(), SlowMedia()
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, media={"image": 1})
    body = json.dumps(WITH_PICTURE[path]).encode()
    connection = Connection(body, {"x-request-timeout": "0.1"}, path)
    async with serving(omni, connection, media):
        await media.ended.wait()
    assert connection.status == 504

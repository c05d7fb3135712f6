"""A generation ends when its client leaves, and nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_omni import FakeOmni

from polymux.config import ServerConfig
from polymux.server.app import build_app
from polymux.server.state import ServerState

pytestmark = pytest.mark.anyio

BODY = json.dumps({"prompt": "a", "seed": 1}).encode()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Connection:
    """One HTTP request as an ASGI server shows it."""

    def __init__(self, body: bytes = BODY, headers: dict[str, str] | None = None) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/images/generations",
            "raw_path": b"/v1/images/generations",
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
async def serving(omni: FakeOmni, connection: Connection) -> AsyncIterator[asyncio.Task[None]]:
    app: Any = build_app(ServerState(omni, ServerConfig()))
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

"""The application behind uvicorn, as `polymux serve` sets it up, on a socket in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fake_omni import FakeOmni

from polymux.knobs import build
from polymux.server.run import http_config
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig


@contextlib.asynccontextmanager
async def listening(omni: FakeOmni | None = None, **server_args: Any) -> AsyncIterator[int]:
    """The port."""
    state = ServerState(omni or FakeOmni(), build(ServerConfig, server_args))
    server = uvicorn.Server(http_config(state))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    serving = asyncio.create_task(server._serve([listener]))  # without its signal handlers
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        await state.aclose()


class Answer:
    """What came back over a connection, up to its end."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1]) if first else 0  # 0: nothing came
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/json"
        assert int(self.headers["content-length"]) == len(self.body)
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


async def exchange(port: int, *pieces: bytes, tls: ssl.SSLContext | None = None) -> Answer:
    """Send bytes as they are; what the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return Answer(await asyncio.wait_for(reader.read(), 10))
    finally:
        writer.close()


def request(method: str = "GET", path: str = "/health", body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request that closes the connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body and not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body

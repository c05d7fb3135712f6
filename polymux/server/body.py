"""Request bodies: a limit that holds before anything is parsed, and JSON into typed objects.

The limit counts the bytes that arrive, so a wrong or missing Content-Length does not get around it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymux.errors import InvalidRequestError, PayloadTooLargeError
from polymux.server.errors import error_body, from_validation

Model = TypeVar("Model", bound=BaseModel)

LINGER_S = 5.0


async def parse(request: Request, model: type[Model]) -> Model:
    """The JSON body as a `model`. Raises InvalidRequestError."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequestError(f"Content-Type {media_type[:80]!r}: must be application/json")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise from_validation(error, model) from None


class BodyLimit:
    """ASGI middleware: reads the body, at most `limit` bytes of it, before the application sees the request."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self.limit:
            await self._refuse(receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client left while it was sending
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.limit:
                await self._refuse(receive, send)
                return
        await self.app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        error = PayloadTooLargeError(f"the body has more than {self.limit} bytes (--max-body-bytes)")
        content = error_body(error).model_dump_json().encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        # The answer is out. To close now, with unread data in the socket, would reset the connection, and a client that
        # still sends would never see the answer. So read on for a while, and drop what comes.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_drain(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, and then what comes after it (the disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay

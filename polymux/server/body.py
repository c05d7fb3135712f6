"""Request bodies: a limit that holds for whoever reads one, and JSON into typed objects.

The limit counts the bytes that arrive, so a wrong or missing Content-Length does not get around it. What a form holds
stands in `forms`.
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
    content = b"".join([chunk async for chunk in request.stream()])  # the request itself keeps no copy
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise from_validation(error, model) from None


class BodyLimit:
    """ASGI middleware: the application gets to read at most `limit` bytes of a body.

    What it leaves unread is read and dropped before its answer goes out: to answer with unread data in the socket would
    reset the connection, and a client that still sends would never see the answer.
    """

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
        body = _CountedBody(receive, self.limit)

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await body.drain()
            if not (body.too_large or body.cut_off):
                await send(message)

        await self.app(scope, body.receive, send_after_body)
        if body.too_large:
            await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        content = error_body(_too_large(self.limit)).model_dump_json().encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": PayloadTooLargeError.status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        # The answer is out. A client that does not look while it sends gets some time to send the rest.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_drain(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _CountedBody:
    """A request's body as it arrives. Once it is too large, `receive` raises PayloadTooLargeError."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._count = 0
        self._complete = False
        self.cut_off = False  # the client left while it was sending
        self.too_large = False

    async def receive(self) -> Message:
        if self.cut_off:
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] != "http.request":
            self.cut_off = not self._complete
            return message
        self._count += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._count > self._limit:
            self.too_large = self._complete = True
            raise _too_large(self._limit)
        return message

    async def drain(self) -> None:
        """Read and drop what is left, for some seconds at most."""
        with contextlib.suppress(TimeoutError, PayloadTooLargeError):
            async with asyncio.timeout(LINGER_S):
                while not (self._complete or self.cut_off):
                    await self.receive()


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body has more than {limit} bytes (--max-body-bytes)")


async def _drain(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return

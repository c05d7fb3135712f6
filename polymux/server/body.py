"""Request bodies: limits that hold for whoever reads one, and JSON into typed objects.

The limits count the bytes that arrive, so a wrong or missing Content-Length does not get around them. What a form holds
stands in `forms`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymux.errors import (
    BadHttpError,
    MediaTypeError,
    OverloadedError,
    PayloadTooLargeError,
    PolymuxError,
    ReceiveTimeoutError,
)
from polymux.server.deadline import set_deadline
from polymux.server.errors import error_body, error_headers, error_response, from_validation, headers_too_large
from polymux.server.json_guard import check_json
from polymux.server.log import note
from polymux.server_config import HttpConfig

Model = TypeVar("Model", bound=BaseModel)

LINGER_S = 5.0


async def parse(request: Request, model: type[Model], *, or_form: bool = False) -> Model:
    """The JSON body as a `model`. `or_form`: the route takes forms too, and this is none.

    Raises InvalidRequestError, MediaTypeError.
    """
    _check_is_json(request.headers.get("content-type", "application/json"), " or multipart/form-data" * or_form)
    content = b"".join([chunk async for chunk in request.stream()])  # the request itself keeps no copy
    limits: HttpConfig = request.state.limits
    check_json(content, max_depth=limits.max_json_depth, max_values=limits.max_json_values)
    try:
        body = model.model_validate_json(content)
    except ValidationError as error:
        raise from_validation(error, model) from None
    note(request, body)
    return body


def _check_is_json(content_type: str, other: str) -> None:
    media_type, _, rest = content_type.lower().partition(";")
    if media_type.strip() != "application/json" and not media_type.strip().endswith("+json"):
        raise MediaTypeError(f"Content-Type {content_type[:80]!r}: must be application/json{other}")
    for parameter in rest.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise MediaTypeError(f"Content-Type {content_type[:80]!r}: JSON is read as UTF-8 only")


class BodyLimit:
    """ASGI middleware: the application gets to read no more of a body than the limits allow, and no later.

    What it leaves unread is read and dropped before its answer goes out: to answer with unread data in the socket would
    reset the connection, and a client that still sends would never see the answer.
    """

    def __init__(self, app: ASGIApp, limits: HttpConfig) -> None:
        self.app = app
        self.limits = limits
        self.held = _Held(limits.max_total_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            _check_head_size(scope, self.limits.max_header_bytes)
            _check_headers(Headers(scope=scope), self.limits.max_body_bytes)
            set_deadline(scope, self.limits.request_timeout)
        except PolymuxError as error:
            await _refuse(error, receive, send)
            return
        scope.setdefault("state", {})["limits"] = self.limits
        body = _CountedBody(receive, self.limits, self.held)
        if Headers(scope=scope).get("expect", "").lower() == "100-continue":
            body.awaited = False

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.drained():
                MutableHeaders(scope=message)["connection"] = "close"
            if not (body.failure or body.cut_off):
                await send(message)

        try:
            await self.app(scope, body.receive, send_after_body)
        finally:
            self.held.bytes -= body.held
        if body.failure is not None:
            await _refuse(body.failure, receive, send, linger=not body.arrived)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket has no body; how large its messages may be is told to the protocol."""
        try:
            _check_head_size(scope, self.limits.max_header_bytes)
            set_deadline(scope, self.limits.request_timeout)
        except PolymuxError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["limits"] = self.limits
        await self.app(scope, receive, send)


class _Held:
    """Bytes of all bodies that requests under way have sent."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0


class _CountedBody:
    """A request's body as it arrives. Once a limit is passed, `receive` raises what `failure` then says."""

    def __init__(self, receive: Receive, limits: HttpConfig, all_held: _Held) -> None:
        self._receive = receive
        self._limits = limits
        self._all_held = all_held
        self._count = 0
        self._complete = False  # nothing is to be read
        self._until = asyncio.get_running_loop().time() + limits.receive_timeout
        self.awaited = True  # the client sends without waiting until somebody wants to read
        self.held = 0  # of `all_held`
        self.arrived = False
        self.cut_off = False  # the client left while it was sending
        self.failure: PolymuxError | None = None

    async def receive(self) -> Message:
        if self.cut_off:
            return {"type": "http.disconnect"}
        message = await self._next()
        if self._all_held.bytes + (size := len(message.get("body", b""))) > self._all_held.limit:
            raise self._fail(_overloaded(self._all_held.limit))
        self.held += size
        self._all_held.bytes += size
        return message

    async def drained(self) -> bool:
        """Read and drop what is left, for some seconds at most. Whether that is all of it."""
        if not self.awaited:
            return False
        with contextlib.suppress(TimeoutError, PolymuxError):
            async with asyncio.timeout(LINGER_S):
                while not (self._complete or self.cut_off):
                    await self._next()
        return self._complete

    async def _next(self) -> Message:
        self.awaited = True
        try:
            async with asyncio.timeout_at(None if self._complete else self._until):
                message = await self._receive()
        except TimeoutError:
            raise self._fail(_late(self._limits.receive_timeout)) from None
        if message["type"] != "http.request":
            self.cut_off = not self._complete
            return message
        self._count += len(message.get("body", b""))
        self._complete = self.arrived = not message.get("more_body", False)
        if self._count > self._limits.max_body_bytes:
            raise self._fail(_too_large(self._limits.max_body_bytes))
        return message

    def _fail(self, error: PolymuxError) -> PolymuxError:
        self.failure, self._complete = error, True
        return error


def _check_head_size(scope: Scope, limit: int) -> None:
    """Raises HeadersTooLargeError. The parser in front counts only what has not come to its end: headers that arrive at
    once are there before it counts."""
    method, path = scope.get("method", "GET"), scope.get("raw_path", b"")
    line = len(method) + len(path) + len(scope["query_string"]) + len(" ? HTTP/1.1\r\n")
    if line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]) > limit:
        raise headers_too_large(limit)


def _check_headers(headers: Headers, limit: int) -> None:
    """Raises the reason why a body is not even read."""
    declared = headers.get("content-length", "0")
    if "content-length" in headers and "transfer-encoding" in headers:  # who is in front may have believed the other
        raise BadHttpError("Content-Length and Transfer-Encoding exclude each other")
    if not declared.isdecimal() or int(declared) > limit:
        raise _too_large(limit)
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise MediaTypeError(f"Content-Encoding {encoding[:80]!r}: bodies are read as they are, without compression")


async def _refuse(error: PolymuxError, receive: Receive, send: Send, linger: bool = True) -> None:
    """Answer and close. `linger`: something of the body may be on its way."""
    content = error_body(error).model_dump_json().encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
    headers |= error_headers(error)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    if linger and not isinstance(error, ReceiveTimeoutError):
        # The answer is out. A client that does not look while it sends gets some time to send the rest.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_drain(receive), LINGER_S)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body has more than {limit} bytes (--max-body-bytes)")


def _late(seconds: float) -> ReceiveTimeoutError:
    return ReceiveTimeoutError(f"the body did not arrive within {seconds:g} s (--receive-timeout)")


def _overloaded(limit: int) -> OverloadedError:
    allowed = f"allowed are {limit} bytes (--max-total-body-bytes)"
    return OverloadedError(f"the bodies of all requests under way are too large together: {allowed}")


async def _drain(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return

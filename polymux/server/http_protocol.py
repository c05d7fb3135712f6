"""HTTP itself, in front of the application: what is not HTTP, arrives too slowly or is one connection too many.

uvicorn's protocol, with our error body for what never becomes a request. Knows no routes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from polymux.errors import BadHttpError, OverloadedError, PolymuxError, ReceiveTimeoutError
from polymux.server.errors import error_body, error_headers, headers_too_large
from polymux.server_config import HttpConfig


def protocol_for(config: HttpConfig) -> type[HttpProtocol]:
    """The protocol class of a server with these limits."""
    return type("HttpProtocol", (HttpProtocol,), {"limits": config})


class HttpProtocol(H11Protocol):
    """One connection."""

    limits: ClassVar[HttpConfig] = HttpConfig()

    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _refusal: PolymuxError | None = None  # of a connection too many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) > most:
            why = f"{len(self.connections)} connections are open: allowed are {most} (--max-connections)"
            self._refusal = OverloadedError(why, retry_after_s=1)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        self._unwatch_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # now that there is a request to answer
            self._refuse(self._refusal)
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unwatch_head()
        elif self._head_timer is None and not self.transport.is_closing():
            self._watch_head()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()  # the base class calls this where it caught what h11 raised, and does not pass it on
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(headers_too_large(self.limits.max_header_bytes))
        else:
            self._refuse(BadHttpError(f"this is not valid HTTP/1.1: {str(error)[:200]}"))

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        headers = dict(event.headers)
        if event.method != b"GET" or headers.get(b"sec-websocket-version") != b"13":
            self._refuse(BadHttpError("a WebSocket is opened with GET and Sec-WebSocket-Version: 13"))
        elif b"sec-websocket-key" not in headers:
            self._refuse(BadHttpError("Sec-WebSocket-Key is missing"))
        else:
            super().handle_websocket_upgrade(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._unwatch_sending()
        super().resume_writing()

    def _watch_sending(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.limits.send_timeout, self._check_sending, left)

    def _unwatch_sending(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_sending(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._watch_sending()
        else:
            self.transport.abort()  # the rest of the answer is given up, and with it its memory

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.receive_timeout, self._head_is_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.conn.trailing_data[0]:  # a connection that was opened for later use
            self.transport.close()
            return
        seconds = self.limits.receive_timeout
        self._refuse(ReceiveTimeoutError(f"the headers did not arrive within {seconds:g} s (--receive-timeout)"))

    def _refuse(self, error: PolymuxError) -> None:
        """Answer and close, if no answer has begun yet; else only close."""
        self._unwatch_head()
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(error).model_dump_json().encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            headers |= error_headers(error)
            reason = STATUS_PHRASES[error.status]
            head = h11.Response(status_code=error.status, headers=list(headers.items()), reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

"""Request ids and the log: one line per request with its id, route, status and seconds.

Prompts only if that is asked for, and then cut; media never. An exception that gets here is logged with its traceback;
the answer was sent before.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymux.logs import FIELDS
from polymux.server.shortened import shortened

logger = logging.getLogger("polymux.server")

_SECRET = re.compile(r"(/v1/files/images/.{8})[^.]+")  # whoever knows the name of a picture has the picture
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_ANSWERS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
SWITCHED = 101  # the status of a WebSocket that was opened
_QUIET = ("/health", "/live", "/ready", "/metrics")  # polled every few seconds


def note(request: HTTPConnection, body: BaseModel) -> None:
    """What this request asks for: for the log, if it is to have it. The body itself is not kept."""
    if request.state.log_body:
        request.state.asked = shortened(body)


class RequestLog:
    """ASGI middleware: gives every request an id (`request.state.request_id`), answers with it, logs the outcome."""

    def __init__(self, app: ASGIApp, with_bodies: bool = False) -> None:
        """`with_bodies`: log what requests ask for, as far as routes `note` it."""
        self.app = app
        self.with_bodies = with_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "log_body": self.with_bodies}
        status, started = 499, time.perf_counter()  # 499 stays if the client left before there was an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in _ANSWERS:
                status = message.get("status", SWITCHED)
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed", request_id)
        finally:
            fields: dict[str, object] = {
                "request_id": request_id,
                "method": scope.get("method", "WEBSOCKET"),
                "path": _SECRET.sub(r"\1...", quote(scope["path"]))[:200],
                "status": status,
                "seconds": round(time.perf_counter() - started, 3),
            }
            if "ended" in state:  # a stream that went wrong after its status was sent
                fields["ended"] = state["ended"]
            if "user" in state:
                fields["user"] = quote(state["user"])
            if "asked" in state:
                fields["request"] = state["asked"]
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            logger.log(level, _line(fields), extra={FIELDS: fields})


def _line(fields: dict[str, object]) -> str:
    """`ID POST /path 200 0.123s user=U request={...}`"""
    first = "{request_id} {method} {path} {status} {seconds:.3f}s".format_map(fields)
    rest = [f"{name}={fields[name]}" for name in ("ended", "user", "request") if name in fields]
    return " ".join([first, *rest])

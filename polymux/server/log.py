"""Request ids and the log: one line per request with its id, route, status and seconds; never a prompt or media.

The outermost layer. An exception that reaches it is logged with its traceback; the answer was sent before.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("polymux.server")

_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_QUIET = ("/health", "/metrics")  # polled every few seconds


class RequestLog:
    """ASGI middleware: gives every request an id (`request.state.request_id`), answers with it, logs the outcome."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status, started = 499, time.perf_counter()  # 499 stays if the client left before there was an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed", request_id)
        finally:
            seconds = time.perf_counter() - started
            user = f" user={quote(state['user'])}" if "user" in state else ""
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            path = quote(scope["path"])[:200]
            logger.log(level, "%s %s %s %d %.3fs%s", request_id, scope["method"], path, status, seconds, user)

"""HTTP requests by route and status, and the process that answers them. Part of what GET /metrics shows.

Routes are told by their templates, so a path that a client makes up adds no series.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymux.metrics import catalog
from polymux.metrics.metrics import counter, histogram
from polymux.server.log import SWITCHED

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"})
CLIENT_LEFT = 499  # before there was an answer


class HttpMetrics:
    """One per server. A registry of its own: several servers may share what is behind them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = counter(catalog.HTTP_REQUESTS, self._registry)
        self._seconds = histogram(catalog.HTTP_SECONDS, self._registry)
        ProcessCollector(registry=self._registry)

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """A request has ended."""
        method = scope.get("method", "WEBSOCKET")
        method = method if method in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class CountRequests:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        status, started = CLIENT_LEFT, time.perf_counter()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = SWITCHED
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._metrics.count(scope, status, time.perf_counter() - started)

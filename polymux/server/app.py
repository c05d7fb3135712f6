"""Puts the server's parts together. From the outside in: metrics, request ids and log, body limit, routes, errors."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from polymux.server import errors, health, images, models, sleep
from polymux.server.body import BodyLimit
from polymux.server.http_metrics import CountRequests
from polymux.server.log import RequestLog
from polymux.server.state import ServerState
from polymux.version import VERSION


def build_app(state: ServerState) -> ASGIApp:
    """The ASGI application. Whoever calls it starts and stops what `state` holds."""
    app = FastAPI(
        title="polymux", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False
    )  # their pages load foreign scripts
    for module in (images, models, sleep, health):
        app.include_router(module.routes(state))
    errors.install(app)
    limited = BodyLimit(app, state.config.max_body_bytes)
    return CountRequests(RequestLog(limited), state.http_metrics)

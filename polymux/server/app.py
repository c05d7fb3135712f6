"""Puts the server's parts together. From the outside in: request ids and log, body limit, routes, errors."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from polymux.config import ServerConfig
from polymux.server import audio, errors, health, images, models, sleep
from polymux.server.body import BodyLimit
from polymux.server.log import RequestLog
from polymux.server.state import Generator, ServerState
from polymux.version import VERSION


def build_app(omni: Generator, config: ServerConfig) -> ASGIApp:
    """The ASGI application. Whoever calls it starts and stops `omni`."""
    state = ServerState(omni, config)
    app = FastAPI(
        title="polymux", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False
    )  # their pages load foreign scripts
    for module in (images, audio, models, sleep, health):
        app.include_router(module.routes(state))
    errors.install(app)
    return RequestLog(BodyLimit(app, config.max_body_bytes))

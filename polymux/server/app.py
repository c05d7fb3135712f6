"""Puts the server's parts together.

From the outside in: metrics, request ids and log, pages of other origins, limits of bodies, keys, routes, errors.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from polymux.server import (
    audio,
    chat,
    errors,
    files,
    health,
    images,
    lora,
    models,
    playground,
    profile,
    realtime,
    sleep,
    speech,
    speech_batch,
    speech_socket,
    transcriptions,
    videos,
    voices,
)
from polymux.server.access import Access, Cors
from polymux.server.body import BodyLimit
from polymux.server.http_metrics import CountRequests
from polymux.server.log import RequestLog
from polymux.server.schema import Api
from polymux.server.state import ServerState
from polymux.version import VERSION


def build_app(state: ServerState) -> ASGIApp:
    """The ASGI application. Whoever calls it starts and stops what `state` holds. Raises ConfigError."""
    config = state.config
    inner: ASGIApp = BodyLimit(Access(build_api(state), config.access, config.host), config.http)
    if config.access.cors_allow_origins:
        inner = Cors(inner, config.access)
    return CountRequests(RequestLog(inner, config.log_requests), state.http_metrics)


def build_api(state: ServerState) -> FastAPI:
    """The routes, and nothing in front of them."""
    # No pages of FastAPI's own: they load foreign scripts.
    app = Api(title="polymux", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    for module in (
        *(images, files, chat, videos, audio, speech, speech_batch, speech_socket, voices, transcriptions, realtime),
        *(models, lora, sleep, profile, health, playground),
    ):
        app.include_router(module.routes(state))
    app.add_api_websocket_route("/{path:path}", errors.no_such_socket)
    errors.install(app)
    return app

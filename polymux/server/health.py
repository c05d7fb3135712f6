"""GET /health, /ready, /live and /metrics: for those who watch the server, not for those who use it."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from polymux.errors import NotReadyError
from polymux.metrics import CONTENT_TYPE
from polymux.orchestrator.orchestrator import Status
from polymux.server.errors import error_body
from polymux.server.protocol import ErrorResponse
from polymux.server.state import ServerState


class Health(BaseModel):
    status: Status


class NotHealthy(Health, ErrorResponse):
    """The usual error, and the state that is behind it."""


class Live(BaseModel):
    status: Literal["live"] = "live"


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=Health, responses={503: {"model": NotHealthy}})
    async def health() -> Response:
        """200 only if a generation would work now; else 503 with the reason."""
        return await _health(state)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=Health, responses={503: {"model": NotHealthy}})
    async def ready() -> Response:
        """The same as /health: whether to send requests here."""
        return await _health(state)

    @router.head("/live", include_in_schema=False)
    @router.get("/live")
    async def live() -> Live:
        """200 as long as the server's process answers, whatever its model does: whether to restart it."""
        return Live()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format. Answers in every state."""
        return Response(state.omni.metrics.render() + state.http_metrics.render(), media_type=CONTENT_TYPE)

    return router


async def _health(state: ServerState) -> Response:
    try:
        await state.omni.health()
    except NotReadyError as error:
        body = error_body(error).model_dump() | {"status": state.omni.status}
        return JSONResponse(body, error.status)
    return JSONResponse({"status": state.omni.status})

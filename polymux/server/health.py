"""GET /health and GET /metrics: for those who watch the server, not for those who use it."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from polymux.errors import NotReadyError
from polymux.metrics import CONTENT_TYPE
from polymux.server.errors import error_body
from polymux.server.state import ServerState


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """200 only if a generation would work now; else 503 with the reason."""
        try:
            await state.omni.health()
        except NotReadyError as error:
            body = error_body(error).model_dump() | {"status": state.omni.status}
            return JSONResponse(body, error.status)
        return JSONResponse({"status": state.omni.status})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format. Answers in every state."""
        return Response(state.omni.metrics.render() + state.http_metrics.render(), media_type=CONTENT_TYPE)

    return router

"""POST /v1/omni/sleep and /v1/omni/wakeup: lend the device to others for a while."""

from __future__ import annotations

from fastapi import APIRouter, Request

from polymux.server.body import parse
from polymux.server.deadline import within
from polymux.server.errors import responses
from polymux.server.protocol import SleepRequest, SleepResponse, WakeUpResponse
from polymux.server.state import ServerState

_SCHEMA = {"content": {"application/json": {"schema": SleepRequest.model_json_schema()}}, "required": False}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/omni/sleep", responses=responses(400, 503, 504), openapi_extra={"requestBody": _SCHEMA})
    async def sleep(request: Request) -> SleepResponse:
        """Answers when requests under way have finished and the memory is free; until wake-up others get 503."""
        body = await parse(request, SleepRequest) if await request.body() else SleepRequest()
        return SleepResponse(level=body.level, freed_bytes=await within(request, state.omni.sleep(body.level)))

    @router.post("/v1/omni/wakeup", responses=responses(503, 504))
    async def wakeup(request: Request) -> WakeUpResponse:
        """Answers when a generation works again."""
        await within(request, state.omni.wake_up())
        return WakeUpResponse()

    return router

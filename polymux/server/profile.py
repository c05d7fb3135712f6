"""POST /start_profile and /stop_profile: traces of the model's processes, where --profiler-config asks for them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from polymux.server.body import parse
from polymux.server.deadline import within
from polymux.server.errors import responses
from polymux.server.protocol import ProfileStarted, ProfileStopped, StartProfileRequest
from polymux.server.state import ServerState

_SCHEMA = {"content": {"application/json": {"schema": StartProfileRequest.model_json_schema()}}, "required": False}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(responses=responses(400, 503, 504))

    @router.post("/start_profile", openapi_extra={"requestBody": _SCHEMA})
    async def start_profile(request: Request) -> ProfileStarted:
        """Every process of the model notes what it does from now on."""
        body = await parse(request, StartProfileRequest) if await request.body() else StartProfileRequest()
        await within(request, state.omni.start_profile(body.profile_prefix))
        return ProfileStarted()

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> ProfileStopped:
        """Answers when the traces are written."""
        return ProfileStopped(files=await within(request, state.omni.stop_profile()))

    return router

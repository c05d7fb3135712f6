"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: names for adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from polymux.errors import InvalidRequestError
from polymux.server.body import parse
from polymux.server.errors import responses
from polymux.server.protocol import AdapterResponse, LoadAdapterRequest, UnloadAdapterRequest
from polymux.server.schemas import schema_of
from polymux.server.state import ServerState


def _body(model: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": schema_of(model)}}, "required": True}}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(responses=responses(400))

    @router.post("/v1/load_lora_adapter", openapi_extra=_body(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> AdapterResponse:
        """Gives a file a name, by which requests can ask for it. The model reads it at its first use."""
        body = await parse(request, LoadAdapterRequest)
        can = state.omni.capabilities  # None: not known yet; the model says at the first use whether it fits
        if can is not None and not can.lora:
            raise InvalidRequestError(f"lora_name: {can.pipeline} takes no LoRA", param="lora_name")
        state.adapters.name(body.lora_name, body.lora_path)
        return AdapterResponse(lora_name=body.lora_name, status="loaded")

    @router.post("/v1/unload_lora_adapter", openapi_extra=_body(UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> AdapterResponse:
        """Takes the name away. Requests under way keep what they use."""
        body = await parse(request, UnloadAdapterRequest)
        state.adapters.forget(body.lora_name)
        return AdapterResponse(lora_name=body.lora_name, status="unloaded")

    return router

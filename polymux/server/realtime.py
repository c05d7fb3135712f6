"""WS /v1/realtime: a conversation in OpenAI's realtime events, with a model that answers."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from polymux.server.realtime_session import RealtimeSession
from polymux.server.state import ServerState


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.websocket("/v1/realtime")
    async def converse(socket: WebSocket) -> None:
        await RealtimeSession(state, socket).run()

    return router

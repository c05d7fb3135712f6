"""WS /v1/audio/speech/stream: a text in pieces, as a language model writes it, and its sentences as sound."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from polymux.server.speech_session import SpeechSession
from polymux.server.state import ServerState


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.websocket("/v1/audio/speech/stream")
    async def stream_speech(socket: WebSocket) -> None:
        await SpeechSession(state, socket).run()

    return router

"""A model that talks in sessions and computes nothing, a client of it, and what tests look for."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import msgspec
import numpy as np
from fake_omni import FakeOmni
from live_server import listening
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from test_chat_text import ANSWERS
from websockets.asyncio.client import ClientConnection, connect

from polymux.errors import RequestAbortedError
from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import Params, Prompt, request_of
from polymux.request import ArrayData, FinishReason, RequestMetrics, SoundPiece, TextPiece
from polymux.validation import validate

RATE = 24000
EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
HELLO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
CREATE = {"type": "response.create"}


class Talker(FakeOmni):
    """Writes two words, waits for `hold`, and says one second of silence if it is asked to speak."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(ANSWERS, hears_at=16000, extra=("pace",), **changes)
        self.reason: FinishReason = "stop"
        self.ended = asyncio.Event()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.ended.set()

    def stream(self, prompt: Prompt, sampling_params: Params, *, request_id: str | None = None, **more: Any) -> Any:
        request = request_of(prompt, sampling_params, request_id or "r")
        assert self.capabilities is not None
        validate(request, self.capabilities, self.config.limits)
        self.requests.append(request)
        self.ended.clear()
        return self._events(request.request_id, "audio" in request.modalities)

    async def _events(self, name: str, spoken: bool) -> AsyncGenerator[Streamed]:
        yield TextPiece(name, "Hello")
        yield TextPiece(name, " you")
        self.started.set()
        waits = [asyncio.create_task(event.wait()) for event in (self.hold, self.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.abort(name)
            raise
        finally:
            for wait in waits:
                wait.cancel()
        if self.ended.is_set():
            raise RequestAbortedError("aborted")
        if self.fails_with is not None:
            raise self.fails_with
        for _ in range(2 * spoken):
            yield SoundPiece(name, 0, ArrayData("float32", (1, 4000), bytes(16000), 8000))
        yield OmniRequestOutput(
            request_id=name,
            prompt=None,
            modality="text",
            text=["Hello you"],
            finish_reason=[self.reason],
            seeds=[5],
            metrics=RequestMetrics(prompt_tokens=7, completion_tokens=2, audio_tokens=3 * spoken),
        )


class Client:
    """Sends events, and checks that those of the server are what OpenAI's client expects."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, *events: dict[str, Any] | str) -> None:
        for event in events:
            await self.socket.send(event if isinstance(event, str) else json.dumps(event))

    async def next(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(await self.socket.recv())
        parsed = EVENTS.validate_python(told)
        assert parsed.type == told["type"] and told["event_id"]
        return told

    async def until(self, kind: str) -> list[dict[str, Any]]:
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events

    async def error(self, *events: dict[str, Any] | str) -> dict[str, Any]:
        await self.send(*events)
        told = await self.next()
        assert told["type"] == "error", told
        error: dict[str, Any] = told["error"]
        return error

    async def session(self, **fields: Any) -> dict[str, Any]:
        await self.send({"type": "session.update", "session": {"type": "realtime"} | fields})
        told = await self.next()
        assert told["type"] == "session.updated", told
        session: dict[str, Any] = told["session"]
        return session

    async def say(self, text: str = "hello") -> None:
        part = {"type": "input_text", "text": text}
        await self.send({"type": "conversation.item.create", "item": HELLO | {"content": [part]}})
        await self.until("conversation.item.done")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


@contextlib.asynccontextmanager
async def talking(omni: FakeOmni, query: str = "", headers: Any = None, **server: Any) -> AsyncIterator[Client]:
    async with (
        listening(omni, **server) as port,
        connect(f"ws://127.0.0.1:{port}/v1/realtime{query}", additional_headers=headers, max_size=None) as socket,
    ):
        client = Client(socket)
        if not query:
            assert (await client.next())["type"] == "session.created"
        yield client


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def sound(ms: int, loud: bool = True) -> dict[str, Any]:
    samples = np.full(ms * RATE // 1000, 6000 if loud else 3, "<i2")
    return {"type": "input_audio_buffer.append", "audio": base64.b64encode(samples.tobytes()).decode()}


def said(omni: FakeOmni, index: int = -1) -> list[tuple[str, list[str]]]:
    """The messages of a request: roles, and texts or kinds."""
    return [(m.role, [p.text if p.kind == "text" else p.kind for p in m.parts]) for m in omni.requests[index].messages]


def heard(omni: FakeOmni, index: int = -1) -> list[tuple[int, int | None]]:
    """The sounds of a request: their milliseconds and rate."""
    sounds = [item for item in omni.requests[index].media["audio"] if isinstance(item, ArrayData)]
    return [(item.shape[1] * 1000 // (item.sample_rate or 1), item.sample_rate) for item in sounds]


TURNS = {"audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 200}}}}
NO_TURNS = {"audio": {"input": {"turn_detection": None}}}

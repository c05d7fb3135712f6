"""WS /v1/audio/speech/stream against a generator that computes nothing: who may open one, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import msgspec
import pytest
from live_server import listening
from test_speech_route import SENTENCE, SPEAKS, SpeakingOmni
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from polymux.errors import GenerationError, StageDeadError
from polymux.prompts import Params, Prompt
from polymux.request import ArrayData, SamplingParams, SoundPiece
from polymux.server.speech_session import Speakers

PATH = "/v1/audio/speech/stream"
CONFIG = {"type": "session.config", "response_format": "pcm", "seed": 3}
PCM = len(SENTENCE[0]) * 2  # bytes of one of the three pieces of every sentence


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def to(port: int, **headers: str) -> Any:
    return connect(f"ws://127.0.0.1:{port}{PATH}", additional_headers=headers)


async def send(socket: ClientConnection, *messages: dict[str, Any]) -> None:
    for message in messages:
        await socket.send(json.dumps(message))


async def event(socket: ClientConnection) -> dict[str, Any]:
    """The next one that is no sound."""
    while isinstance(message := await socket.recv(), bytes):
        pass
    told: dict[str, Any] = json.loads(message)
    return told


def text(said: str) -> dict[str, Any]:
    return {"type": "input.text", "text": said}


DONE = {"type": "input.done"}


@pytest.mark.parametrize(
    ("server", "headers", "status"),
    [
        ({}, {}, 101), ({}, {"Origin": "https://evil.example"}, 403), ({}, {"Origin": "null"}, 403),
        ({"cors_allow_origins": ("https://good.example",)}, {"Origin": "https://good.example"}, 101),
        ({"api_key": ("k",)}, {}, 401), ({"api_key": ("k",)}, {"Authorization": "Bearer x"}, 401),
        ({"api_key": ("k",)}, {"Authorization": "Bearer k", "Origin": "https://evil.example"}, 101),
        ({}, {"x-request-timeout": "soon"}, 400), ({"max_header_bytes": 1024}, {"x-long": "a" * 2000}, 431),
    ],
)  # fmt: skip
def test_who_may_open_one(server: dict[str, Any], headers: dict[str, str], status: int) -> None:
    async def work() -> None:
        async with listening(SpeakingOmni(), **server) as port:
            try:
                async with to(port, **headers, **{"x-request-id": "mine"}) as socket:
                    assert status == 101 and socket.response.headers["x-request-id"] == "mine"
            except InvalidStatus as refused:
                assert refused.response.status_code == status
                assert status == 431 or set(json.loads(refused.response.body)["error"]) >= {"message", "code"}

    run(work())


def test_other_routes_take_no_sockets() -> None:
    async def work() -> None:
        async with listening(SpeakingOmni()) as port:
            for path in ("/v1/audio/speech", "/health", "/nothing"):
                with pytest.raises(InvalidStatus) as refused:
                    async with connect(f"ws://127.0.0.1:{port}{path}"):
                        pass
                assert refused.value.response.status_code == 404
                assert json.loads(refused.value.response.body)["error"]["code"] == "unknown_url"

    run(work())


def test_the_seed_is_drawn_once_and_told() -> None:
    async def work() -> None:
        omni = SpeakingOmni()
        async with listening(omni) as port, to(port) as socket:
            await send(socket, CONFIG | {"seed": None}, text("One. Two. "), DONE)
            seeds = set()
            while (told := await event(socket))["type"] != "session.done":
                seeds |= {told["seed"]} if told["type"] == "audio.start" else set()
        assert len(seeds) == 1 and {request.sampling.seed for request in omni.requests if request.sampling} == seeds
        assert [request.prompt for request in omni.requests] == ["One.", "Two."]

    run(work())


def test_a_config_comes_first_and_not_in_the_middle() -> None:
    async def work() -> None:
        omni = SpeakingOmni()
        async with listening(omni) as port, to(port) as socket:
            for message in (text("One. "), DONE):
                await send(socket, message)
                told = await event(socket)
                assert (told["type"], told["error"]["param"]) == ("error", "type")
            await send(socket, CONFIG, text("On"), CONFIG)
            told = await event(socket)
            assert (told["type"], told["error"]["param"]) == ("error", "type")
        assert not omni.requests

    run(work())


@pytest.mark.parametrize("first", [None, CONFIG])
def test_a_client_that_says_nothing(first: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr("polymux.server.speech_session._CONFIG_S", 0.2)
        async with listening(SpeakingOmni(), speech_idle_timeout=0.2) as port, to(port) as socket:
            if first is not None:
                await send(socket, first)
            told = await event(socket)
            assert told["error"]["code"] == "receive_timeout"
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008

    run(work())


def test_to_speak_is_not_to_be_idle() -> None:
    async def work() -> None:
        omni = SpeakingOmni()
        omni.hold.clear()
        async with listening(omni, speech_idle_timeout=0.2) as port, to(port) as socket:
            await send(socket, CONFIG, text("One."), DONE)
            assert (await event(socket))["type"] == "audio.start"
            await omni.started.wait()
            await asyncio.sleep(0.6)
            omni.hold.set()
            done = await event(socket)
            assert done["type"] == "audio.done" and done["total_bytes"] == 3 * PCM

    run(work())


def test_a_session_has_its_time() -> None:
    async def work() -> None:
        omni = SpeakingOmni()
        omni.hold.clear()
        async with listening(omni) as port, to(port, **{"x-request-timeout": "0.4"}) as socket:
            await send(socket, CONFIG, text("One."), DONE)
            assert (await event(socket))["type"] == "audio.start"
            assert (await event(socket))["error"]["code"] == "deadline_exceeded"
            with pytest.raises(ConnectionClosed):
                await socket.recv()
        assert len(omni.aborted) == 1

    run(work())


@pytest.mark.parametrize("error", [GenerationError("no"), StageDeadError("gone")])
def test_a_sentence_that_fails_says_so_and_the_next_is_spoken(error: Exception) -> None:
    async def work() -> None:
        omni = SpeakingOmni()
        omni.fails_with = error
        async with listening(omni) as port, to(port) as socket:
            await send(socket, CONFIG, text("One. "))
            await event(socket)
            done = await event(socket)
            assert done["type"] == "audio.done" and done["total_bytes"] == 2 * PCM and done["error"]["code"]
            omni.fails_with = None
            await send(socket, text("Two."), DONE)
            assert [(await event(socket)).get("error") for _ in range(3)] == [None, None, None]

    run(work())


def test_leaving_aborts_at_once() -> None:
    async def work() -> None:
        omni = SpeakingOmni()
        omni.hold.clear()
        async with listening(omni) as port:
            async with to(port) as socket:
                await send(socket, CONFIG, text("One. Two. Three."), DONE)
                await omni.started.wait()
            while not omni.aborted:
                await asyncio.sleep(0.01)
        assert len(omni.requests) == len(omni.aborted) == 1

    run(work())


class Loud(SpeakingOmni):
    """Says more than a connection holds."""

    async def stream(  # type: ignore[override]
        self, prompt: Prompt, sampling_params: Params, *, request_id: str | None = None
    ) -> AsyncGenerator[SoundPiece]:
        assert request_id is not None
        try:
            for _ in range(64):
                piece = ArrayData("float32", (1, 2**19), bytes(2**21), 8000)
                yield SoundPiece(request_id, 0, piece)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise


def test_a_client_that_takes_nothing() -> None:
    async def work() -> None:
        omni = Loud()
        async with (
            listening(omni, send_timeout=0.3) as port,
            connect(f"ws://127.0.0.1:{port}{PATH}", max_queue=1, close_timeout=0.1) as socket,
        ):
            await send(socket, CONFIG, text("One."), DONE)
            while not omni.aborted:
                await asyncio.sleep(0.01)
        assert len(omni.aborted) == 1

    run(work())


def test_what_waits_is_limited() -> None:
    async def work() -> None:
        omni = SpeakingOmni(max_prompt_length=100)
        omni.hold.clear()
        async with listening(omni) as port, to(port) as socket:
            await send(socket, CONFIG, text("One. " * 18))
            await event(socket)
            await omni.started.wait()
            await send(socket, text("Two. " * 18))
            told = await event(socket)
            assert told["error"]["param"] == "text" and "--max-prompt-length" in told["error"]["message"]
            for _ in range(101):
                await send(socket, DONE)
            told = await event(socket)
            assert told["error"]["param"] == "type"

    run(work())


def test_speakers_are_carried_on() -> None:
    speakers, params = Speakers(("[S1]", "[S2]")), SamplingParams(voice="S1")
    plain = SamplingParams()
    said = ("Hello.", "You. [S2] Me.", "Still.", "[S1] Back. [S2] And forth.", "[S1] Here.", "More.")
    assert [speakers.of(text, params) for text in said] == [
        ("Hello.", params), ("You. [S2] Me.", params), ("[S2] Still.", plain), ("[S1] Back. [S2] And forth.", plain),
        ("[S1] Here.", plain), ("[S1] More.", plain),
    ]  # fmt: skip
    assert Speakers(()).of("[S1] a", params) == ("[S1] a", params)
    assert msgspec.structs.replace(SPEAKS, speaker_marks=("[S1]",)).speaker_marks

"""WS /v1/realtime against a generator that computes nothing: events, turns, what cancels, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_omni import FakeOmni
from live_server import listening
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from test_chat_text import ANSWERS
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from polymux.errors import GenerationError, RequestAbortedError
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


def test_a_text_is_answered_with_text() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            await client.session(output_modalities=["text"], instructions="Be brief.", max_output_tokens=9, seed=3)
            await client.say()
            await client.say("and?")
            await client.send(CREATE)
            events = await client.until("response.done")
            assert kinds(events) == [
                "response.created", "response.output_item.added", "conversation.item.added",
                "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
                "response.output_text.done", "response.content_part.done", "response.output_item.done",
                "conversation.item.done", "response.done",
            ]  # fmt: skip
            assert events[6]["text"] == "".join(e["delta"] for e in events[4:6]) == "Hello you"
            done = events[-1]["response"]
            assert done["status"] == "completed" and done["seed"] == 5 and done["id"] == events[0]["response"]["id"]
            assert done["usage"] == {"total_tokens": 9, "input_tokens": 7, "output_tokens": 2,
                                     "output_token_details": {"text_tokens": 2, "audio_tokens": 0}}  # fmt: skip
            content = [{"type": "output_text", "text": "Hello you"}]
            assert [item["content"] for item in done["output"]] == [content]
            assert omni.requests[0].modalities == ("text",)
            assert omni.requests[0].sampling.max_new_tokens == 9 and omni.requests[0].sampling.seed == 3  # type: ignore[union-attr]
            await client.say("bye")
            await client.send(CREATE | {"response": {"instructions": "Be long.", "max_output_tokens": "inf"}})
            await client.until("response.done")
        assert said(omni, 0) == [("system", ["Be brief."]), ("user", ["hello", "and?"])]
        assert said(omni) == [
            ("system", ["Be long."]),
            *said(omni, 0)[1:],
            ("assistant", ["Hello you"]),
            ("user", ["bye"]),
        ]
        assert omni.requests[1].sampling.max_new_tokens is None  # type: ignore[union-attr]

    run(work())


def test_sound_is_answered_with_sound() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            session = await client.session(audio=NO_TURNS["audio"] | {"output": {"voice": "ben"}}, temperature=0.5)
            assert session["output_modalities"] == ["audio"] and session["audio"]["output"]["voice"] == "ben"
            await client.send(sound(300), sound(200), {"type": "input_audio_buffer.commit"})
            committed, added, done = [await client.next() for _ in range(3)]
            assert committed["type"] == "input_audio_buffer.committed" and committed["previous_item_id"] is None
            assert committed["item_id"] == added["item"]["id"] == done["item"]["id"]
            assert done["item"]["content"] == [{"type": "input_audio", "transcript": None}]
            await client.send(CREATE)
            events = await client.until("response.done")
            deltas = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
            assert len(b"".join(map(base64.b64decode, deltas))) == 2 * RATE and len(deltas) > 1
            assert kinds(events)[-6:-4] == ["response.output_audio.done", "response.output_audio_transcript.done"]
            assert events[-5]["transcript"] == "Hello you"
            assert events[-1]["response"]["output"][0]["content"] == [
                {"type": "output_audio", "transcript": "Hello you"}
            ]
            assert events[-1]["response"]["usage"]["output_token_details"]["audio_tokens"] == 3
            assert (await client.error({"type": "input_audio_buffer.commit"}))["message"].startswith(
                "the buffer holds 0"
            )
        assert said(omni) == [("user", ["audio"])] and heard(omni) == [(500, RATE)]
        sampling = omni.requests[0].sampling
        assert sampling is not None and (sampling.voice, sampling.temperature) == ("ben", 0.5)

    run(work())


@pytest.mark.parametrize(
    ("reason", "failure", "status", "why"),
    [
        ("length", None, "incomplete", "max_output_tokens"),
        ("stop", GenerationError("no /root/secret"), "failed", None),
    ],
)
def test_how_a_response_ends(reason: FinishReason, failure: Exception | None, status: str, why: str | None) -> None:
    async def work() -> None:
        omni = Talker()
        omni.reason, omni.fails_with = reason, failure
        async with talking(omni) as client:
            await client.say()
            await client.send(CREATE)
            response = (await client.until("response.done"))[-1]["response"]
            assert response["status"] == status and response["status_details"]["reason"] == why
            assert (response["usage"] is None) == (failure is not None)
            assert response["output"][0]["status"] == "incomplete"
            if failure is not None:
                error = response["status_details"]["error"]
                assert error == {"type": "server_error", "code": "generation_failed", "message": "no ..."}
            omni.fails_with = None
            await client.say()
            await client.send(CREATE)  # it goes on
            assert (await client.until("response.done"))[-1]["response"]["status"] != "failed"

    run(work())


def test_turns_are_told_and_answered() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            await client.session(**TURNS)
            for event in (sound(1000, False), sound(60), sound(340), sound(100, False)):
                await client.send(event)
            began = await client.next()
            assert began["type"] == "input_audio_buffer.speech_started" and began["audio_start_ms"] == 1000 - 300
            await client.send(sound(500, False))
            ended, committed, *_ = events = await client.until("response.done")
            assert ended["type"] == "input_audio_buffer.speech_stopped" and ended["audio_end_ms"] == 1600
            assert committed["type"] == "input_audio_buffer.committed"
            assert began["item_id"] == ended["item_id"] == committed["item_id"]
            assert events[-1]["response"]["status"] == "completed"
            await client.send(sound(400), sound(300, False))  # the next turn
            began, *_ = await client.until("response.done")
            assert began["audio_start_ms"] == 2000 - 300
        assert heard(omni) == [(900, RATE), (900, RATE)]
        assert said(omni) == [("user", ["audio"]), ("assistant", ["Hello you"]), ("user", ["audio"])]

    run(work())


def test_turns_without_an_answer() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            detection = TURNS["audio"]["input"]["turn_detection"] | {"create_response": False}
            await client.session(audio={"input": {"turn_detection": detection}})
            await client.send(sound(400), sound(300, False))
            await client.until("conversation.item.done")
            assert (await client.session())["audio"]["input"]["turn_detection"]["create_response"] is False
        assert not omni.requests

    run(work())


def test_a_turn_that_has_no_room_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr("polymux.server.realtime_conversation.MAX_ITEMS", 0)
        async with talking(Talker()) as client:
            await client.session(**TURNS)
            turn = sound(400)["audio"], sound(400, False)["audio"]
            both = b"".join(base64.b64decode(part) for part in turn * 2)
            await client.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(both).decode()})
            events = [await client.next() for _ in range(6)]
            began, ended = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
            assert kinds(events) == [began, ended, "error"] * 2
            assert [events[i]["audio_start_ms"] for i in (0, 3)] == [0, 600]

    run(work())


@pytest.mark.parametrize("interrupts", [True, False])
def test_who_begins_to_speak_ends_the_response(interrupts: bool) -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with talking(omni) as client:
            detection = TURNS["audio"]["input"]["turn_detection"] | {"interrupt_response": interrupts}
            await client.session(audio={"input": {"turn_detection": detection}})
            await client.say()
            await client.send(CREATE)
            await omni.started.wait()
            await client.send(sound(400))
            await client.until("input_audio_buffer.speech_started")
            if interrupts:
                response = (await client.until("response.done"))[-1]["response"]
                assert response["status"] == "cancelled" and response["usage"] is None
                assert response["status_details"]["reason"] == "turn_detected"
                assert response["output"][0]["content"][0]["transcript"] == "Hello you"
                assert omni.aborted == [omni.requests[0].request_id]
            await client.send(sound(300, False))
            await client.until("input_audio_buffer.committed")
            omni.hold.set()
            for _ in range(1 if interrupts else 2):
                assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
        assert said(omni) == [("user", ["hello"]), ("assistant", ["Hello you"]), ("user", ["audio"])]
        assert len(omni.requests) == 2

    run(work())


def test_a_response_is_cancelled_by_its_client() -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with talking(omni) as client:
            cancel = {"type": "response.cancel"}
            assert (await client.error(cancel))["param"] == "response_id"
            await client.say()
            await client.send(CREATE)
            name = (await client.next())["response"]["id"]
            await omni.started.wait()
            await client.until("response.output_audio_transcript.delta")
            await client.until("response.output_audio_transcript.delta")
            assert (await client.error(CREATE | {"event_id": "mine"}))["event_id"] == "mine"  # one at a time
            assert (await client.error(cancel | {"response_id": "resp_other"}))["param"] == "response_id"
            await client.send(cancel | {"response_id": name})
            response = (await client.until("response.done"))[-1]["response"]
            assert response["status_details"]["reason"] == "client_cancelled" and response["id"] == name
        assert len(omni.aborted) == 1

    run(work())


def test_leaving_aborts() -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with listening(omni) as port:
            async with connect(f"ws://127.0.0.1:{port}/v1/realtime") as socket:
                client = Client(socket)
                await client.next()
                await client.say()
                await client.send(CREATE)
                await omni.started.wait()
            while not omni.aborted:
                await asyncio.sleep(0.01)
        assert omni.aborted == [omni.requests[0].request_id]

    run(work())


def test_items_have_an_order_and_may_go() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:

            def item(name: str, text: str, role: str = "user", kind: str = "input_text", **more: Any) -> dict[str, Any]:
                made = {"type": "message", "id": name, "role": role, "content": [{"type": kind, "text": text}]}
                return {"type": "conversation.item.create", "item": made} | more

            for event in (item("a", "one"), item("b", "two", "assistant", "output_text"), item("c", "three"),
                          item("d", "zero", "system", previous_item_id="root"),
                          item("e", "extra", previous_item_id="a")):  # fmt: skip
                await client.send(event)
                added, _ = await client.until("conversation.item.done")
                assert (
                    added["previous_item_id"]
                    == {"a": None, "b": "a", "c": "b", "d": None, "e": "a"}[added["item"]["id"]]
                )
            assert (await client.error(item("a", "again")))["param"] == "item.id"
            assert (await client.error(item("f", "x", previous_item_id="g")))["param"] == "previous_item_id"
            assert (await client.error(item("f", "x" * 40_000)))["param"] == "item"
            assert (await client.error({"type": "conversation.item.delete", "item_id": "f"}))["param"] == "item_id"
            await client.send({"type": "conversation.item.delete", "item_id": "e"})
            assert (await client.next())["type"] == "conversation.item.deleted"
            await client.send(CREATE)
            await client.until("response.done")
            audio = {"type": "input_audio", "audio": sound(300)["audio"]}
            await client.send({"type": "conversation.item.create", "item": HELLO | {"content": [audio]}}, CREATE)
            await client.until("response.done")
            assert (await client.error(CREATE | {"event_id": "x"}))["event_id"] == "x"  # the answer is the last item
        expected = [("system", ["zero"]), ("user", ["one"]), ("assistant", ["two"]), ("user", ["three"])]
        assert said(omni, 0) == expected and heard(omni) == [(300, RATE)]

    run(work())


def of_session(**fields: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": fields, "event_id": "mine"}


def of_item(**fields: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": HELLO | fields, "event_id": "mine"}


WRONG: list[tuple[Any, str | None]] = [
    ("{", None), ("[]", "type"), ('{"type": 1}', "type"), ({"type": "session.close"}, "type"),
    ({"type": "conversation.item.truncate", "item_id": "a"}, "type"),
    (of_session(voice="ben"), "session.voice"), (of_session(modalities=["text"]), "session.modalities"),
    (of_session(output_modalities=["text", "audio"]), "session.output_modalities"),
    (of_session(type="transcription"), "session.type"), (of_session(model="other"), "model"),
    (of_session(max_output_tokens=0), "session.max_output_tokens"),
    (of_session(max_output_tokens="all"), "session.max_output_tokens"),
    (of_session(temperature=-1), "session.temperature"), (of_session(seed=-1), "session.seed"),
    (of_session(extra_args={"x": 1}), "session.extra_args.x"),
    (of_session(instructions="a" * 40_000), "session.instructions"),
    (of_session(tools=[{"type": "function"}]), "session.tools"),
    (of_session(audio={"output": {"voice": "eve"}}), "session.audio.output.voice"),
    (of_session(audio={"output": {"speed": 2}}), "session.audio.output.speed"),
    (of_session(audio={"input": {"format": {"type": "audio/pcmu"}}}), "session.audio.input.format.type"),
    (of_session(audio={"input": {"format": {"type": "audio/pcm", "rate": 8000}}}),
     "session.audio.input.format.rate"),
    (of_session(audio={"input": {"turn_detection": {"type": "semantic_vad"}}}),
     "session.audio.input.turn_detection.type"),
    (of_session(audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}),
     "session.audio.input.turn_detection.threshold"),
    ({"type": "input_audio_buffer.append", "audio": "AAA"}, "audio"),
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio"),
    ({"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(4000)).decode()}, "audio"),
    ({"type": "input_audio_buffer.append"}, "audio"), ({"type": "input_audio_buffer.clear", "x": 1}, "x"),
    (of_item(role="tool"), "item"), (of_item(content=[]), "item.content"),
    (of_item(type="function_call"), "item.type"),
    (of_item(content=[{"type": "input_image", "image_url": "a"}]), "item.content.0"),
    (of_item(content=[{"type": "input_text"}]), "item.content.0.text"),
    (of_item(content=[{"type": "input_audio", "audio": "?"}]), "item.content.0.audio"),
    ({"type": "response.create", "response": {"input": []}}, "response.input"),
    ({"type": "response.create", "response": {"temperature": -1}}, "response.temperature"),
    ({"type": "response.create", "response": {"conversation": "none"}}, "response.conversation"),
    (CREATE, None), ('{"type": "response.cancel", "event_id": "\\ud800"}', None),
]  # fmt: skip


def test_what_is_wrong_is_told_and_the_session_goes_on() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni, max_media_bytes=3000) as client:
            before = await client.session()
            for event, param in WRONG:
                error = await client.error(event)
                assert (error["type"], error["param"]) == ("invalid_request_error", param), (event, error)
                assert error["event_id"] == (event.get("event_id") if isinstance(event, dict) else error["event_id"])
            assert await client.session() == before
            assert not omni.requests

    run(work())


def test_a_model_that_neither_hears_nor_speaks() -> None:
    async def work() -> None:
        omni = Talker(media={}, makes=("text",), voices=())
        async with talking(omni) as client:
            session = await client.session()
            assert session["output_modalities"] == ["text"] and session["audio"]["input"]["turn_detection"] is None
            for event, param in (
                (of_session(output_modalities=["audio"]), "session.output_modalities"),
                (of_session(**TURNS), "session.audio.input.turn_detection"),
                (of_session(audio={"output": {"voice": "ben"}}), "session.audio.output.voice"),
                (sound(10), "audio"),
                (of_item(content=[{"type": "input_audio", "audio": "AAA="}]), "item.content.0"),
                (CREATE | {"response": {"output_modalities": ["audio"]}}, "response.output_modalities"),
            ):
                assert (await client.error(event))["param"] == param
            await client.say()
            await client.send(CREATE)
            assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"

    run(work())


def test_what_was_appended_can_be_cleared() -> None:
    async def work() -> None:
        async with talking(Talker(), max_media_bytes=20_000) as client:
            await client.session(**NO_TURNS)
            await client.send(sound(300))
            assert (await client.error(sound(300)))["param"] == "audio"  # too much together
            await client.send({"type": "input_audio_buffer.clear"}, sound(300))
            assert (await client.next())["type"] == "input_audio_buffer.cleared"
            await client.session(**TURNS)
            for _ in range(9):  # nobody speaks: it does not fill up
                await client.send(sound(100, False))
            await client.session()

    run(work())


@pytest.mark.parametrize(
    ("query", "changes", "param"),
    [
        ("?model=other", {}, "model"),
        ("?intent=transcription", {}, "intent"),
        ("?model=fake/model", {"chats": False}, "model"),
    ],
)
def test_who_cannot_be_talked_with(query: str, changes: dict[str, Any], param: str) -> None:
    async def work() -> None:
        async with talking(Talker(**changes), query) as client:
            assert (await client.next())["error"]["param"] == param
            with pytest.raises(ConnectionClosed) as closed:
                await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008

    run(work())


def test_silence_and_keys() -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with talking(omni, realtime_idle_timeout=0.3) as client:
            await client.say()
            await client.send(CREATE)
            await omni.started.wait()
            await asyncio.sleep(0.6)  # to answer is not to be idle
            omni.hold.set()
            await client.until("response.done")
            assert (await client.next())["error"]["code"] == "receive_timeout"
        with pytest.raises(InvalidStatus) as refused:
            async with talking(omni, api_key=("k",)):
                pass
        assert refused.value.response.status_code == 401

    run(work())

"""POST /v1/chat/completions of a model that answers: what becomes of it, and how errors are told. No model."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from conversations import assistant, data_url, error_of, events_of, picture, text, user
from fake_omni import CAPABILITIES, FakeOmni, client

from polymux.errors import GenerationError, InvalidRequestError
from polymux.media.audio import encode_audio
from polymux.media.video import encode_video
from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import Params, Prompt, request_of
from polymux.request import ArrayData, Progress, Request, RequestMetrics, SoundPiece, TextPiece
from polymux.sampling import FIELDS
from polymux.server.transcripts import MOST, Transcripts
from polymux.validation import validate

URL = "/v1/chat/completions"
ANSWERS = msgspec.structs.replace(
    CAPABILITIES,
    modality="text",
    arguments=("prompt", *FIELDS),
    media={"image": 2, "audio": 2, "video": 1},
    samples=True,
    chats=True,
    makes=("text", "audio"),
    voices=("anna", "ben"),
    sees_at=2.0,
    sample_rate=8000,
)
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "ben", "format": "pcm16"}}


class FakeWriter(FakeOmni):
    """Writes two words, and says one second of silence if it is asked to speak."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(ANSWERS, **changes)
        self.late: Exception | None = None  # comes after the first word

    async def generate(self, prompt: Prompt, sampling_params: Params, **more: Any) -> AsyncGenerator[Any]:  # type: ignore[override]
        sound = []
        async for event in self.stream(prompt, sampling_params, request_id=more.get("request_id")):
            if isinstance(event, SoundPiece):
                sound.append(np.frombuffer(event.samples.data, "f4").reshape(1, -1))
            elif isinstance(event, OmniRequestOutput):
                event.audio = [np.concatenate(sound, axis=1)] if sound else []
                yield event

    async def stream(
        self, prompt: Prompt, sampling_params: Params, *, request_id: str | None = None
    ) -> AsyncGenerator[Streamed]:
        request = request_of(prompt, sampling_params, request_id or "r")
        assert self.capabilities is not None
        validate(request, self.capabilities, self.config.limits)
        self.requests.append(request)
        if self.fails_with is not None:
            raise self.fails_with
        name = request.request_id
        yield Progress(name, "queued", 0, 0)
        yield TextPiece(name, "Hello")
        if self.late is not None:
            raise self.late
        yield TextPiece(name, " you")
        spoken = "audio" in request.modalities
        if spoken:
            silence = np.zeros((1, 4000), np.float32).tobytes()
            for _ in range(2):
                yield SoundPiece(name, 0, ArrayData("float32", (1, 4000), silence, 8000))
        yield OmniRequestOutput(
            request_id=name,
            prompt=None,
            modality="text",
            text=["Hello you"],
            finish_reason=["stop"],
            seeds=[5],
            sample_rate=8000 if spoken else None,
            metrics=RequestMetrics(prompt_tokens=7, completion_tokens=2, audio_tokens=3 * spoken),
        )


def ask(*messages: Any, omni: FakeOmni | None = None, server: dict[str, Any] | None = None, **fields: Any) -> Any:
    async def send() -> httpx.Response:
        async with client(omni or FakeWriter(), **server or {}) as http:
            return await http.post(URL, json={"messages": list(messages)} | fields)

    return asyncio.run(send())


def request_for(*messages: Any, **fields: Any) -> Request:
    omni = FakeWriter()
    answer = ask(*messages, omni=omni, **fields)
    assert answer.status_code == 200, answer.text
    (request,) = omni.requests
    return request


def sound(seconds: float = 0.5, format: str = "wav") -> dict[str, Any]:
    data = encode_audio(np.zeros((1, int(8000 * seconds)), np.float32), 8000, "wav")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


def film(frames: int, fps: float) -> dict[str, Any]:
    file = io.BytesIO()
    encode_video(np.zeros((frames, 16, 16, 3), np.uint8), fps, file)
    return {"type": "video_url", "video_url": {"url": "data:;base64," + base64.b64encode(file.getvalue()).decode()}}


def test_the_fields_are_those_of_the_parameters() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["a", "b"],
        "max_completion_tokens": 9,
    }
    params = request_for(user("x"), **fields).sampling
    assert params is not None and params.max_new_tokens == 9 and params.stop == ("a", "b")
    for name, value in fields.items():
        if name not in ("stop", "max_completion_tokens"):
            assert getattr(params, name) == value
    one = request_for(user("x"), stop="a", max_tokens=4, temperature=0, top_p=1, n=1, tools=[], logprobs=False).sampling
    assert one is not None and (one.stop, one.max_new_tokens, one.temperature, one.top_p) == (("a",), 4, 0, None)


def test_what_was_said() -> None:
    messages = ({"role": "developer", "content": [text("be"), text("brief")]}, user("a"), assistant("b"),
                user(text("c"), picture(data_url(32))))  # fmt: skip
    made = request_for(*messages).messages
    assert [(one.role, [part.text or part.kind for part in one.parts]) for one in made] == [
        ("system", ["be", "brief"]), ("user", ["a"]), ("assistant", ["b"]), ("user", ["c", "image"]),
    ]  # fmt: skip


def test_media_in_the_order_of_their_parts() -> None:
    made = request_for(
        user(sound(0.5), picture(data_url(32)), film(20, 10), sound(0.25), picture(data_url(64)), text("?"))
    )
    assert [part.kind for part in made.messages[0].parts] == ["audio", "image", "video", "audio", "image", "text"]
    assert [item.shape for item in made.media["audio"]] == [(1, 4000), (1, 2000)]  # type: ignore[union-attr]
    assert [item.width for item in made.media["image"]] == [32, 64]  # type: ignore[union-attr]
    (seen,) = made.media["video"]
    assert isinstance(seen, ArrayData) and seen.shape == (4, 16, 16, 3) and seen.fps == 2.0  # of the ten per second


@pytest.mark.parametrize(
    ("messages", "changes", "param"),
    [
        ([user(text("a"), picture(data_url(32)))], {"media": {}}, "messages.0.content.1"),
        ([user("a"), assistant("b"), user(sound(), text("a"))], {"media": {"image": 1}}, "messages.2.content.0"),
        ([user(*[picture(data_url(16))] * 3)], {}, "messages"),
        ([user({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}})], {}, "messages.0.content.0"),
        ([user({"type": "input_audio", "input_audio": {"data": "", "format": "aac"}})], {},
         "messages.0.content.0.input_audio.format"),
        ([user({"type": "audio_url", "audio_url": {"url": "ftp://x"}})], {}, "messages.0.content.0"),
        ([user({"type": "file", "file": {}})], {}, "messages.0.content.0"),
        ([user(text("a"), picture("data:image/png;base64,AAAA"))], {}, "messages.0.content.1"),
        ([assistant(None, tool_calls=[{"id": 1}]), user("a")], {}, "messages.0.tool_calls"),
        ([assistant([picture(data_url(16))]), user("a")], {}, "messages.0.content.0"),
    ],
)  # fmt: skip
def test_refused_with_the_field(messages: list[Any], changes: dict[str, Any], param: str) -> None:
    omni = FakeWriter(**changes)
    error = error_of(ask(*messages, omni=omni))
    assert error["param"] is not None and error["param"].startswith(param) and omni.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_told_in_the_words_of_the_client(stream: bool) -> None:
    for fault, fields, param in (
        (InvalidRequestError("prompt: too long", param="prompt"), {}, "messages"),
        (InvalidRequestError("max_new_tokens=9: too many", param="max_new_tokens"), {"max_tokens": 9}, "max_tokens"),
        (InvalidRequestError("max_new_tokens=9: too many", param="max_new_tokens"), {"max_completion_tokens": 9},
         "max_completion_tokens"),
        (InvalidRequestError("audio: number 1 is too short", param="audio"), {}, "messages.0.content.0"),
        (InvalidRequestError("voice='x': allowed are", param="voice"), {}, "audio.voice"),
        (InvalidRequestError("seed=1: odd", param="seed"), {}, "seed"),
    ):  # fmt: skip
        omni = FakeWriter()
        omni.fails_with = fault
        error = error_of(ask(user(sound(), text("a")), omni=omni, stream=stream, **fields))
        assert error["param"] == param and error["message"].startswith(param)


def test_speech_whole_and_streamed() -> None:
    said = ask(user("a"), **SPOKEN).json()["choices"][0]["message"]
    assert said["content"] == said["audio"]["transcript"] == "Hello you"
    assert base64.b64decode(said["audio"]["data"]) == bytes(16000)
    events = events_of(ask(user("a"), **SPOKEN, stream=True, stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert {name: events[-2]["usage"][name] for name in usage} == usage
    audio = [c["delta"]["audio"] for e in events[:-2] for c in e["choices"] if "audio" in c["delta"]]
    assert [sorted(one) for one in audio] == [["id", "transcript"]] * 2 + [["data", "id"]] * 2 + [["expires_at", "id"]]
    assert b"".join(base64.b64decode(one["data"]) for one in audio[2:4]) == bytes(16000)
    plain = ask(user("a")).json()
    assert plain["choices"][0]["message"]["audio"] is None and plain["seed"] == 5


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event() -> None:
    omni = FakeWriter()
    omni.late = GenerationError("the model failed")
    events = events_of(ask(user("a"), omni=omni, stream=True))
    assert (
        events[1]["choices"][0]["delta"] == {"content": "Hello"} and events[-1]["error"]["code"] == "generation_failed"
    )
    assert ask(user("a"), omni=omni).status_code == 500


def test_an_answer_that_was_spoken_is_named_by_its_id() -> None:
    omni = FakeWriter()

    async def talk() -> httpx.Response:
        async with client(omni) as http:
            first = (await http.post(URL, json={"messages": [user("a")], **SPOKEN})).json()
            spoken = assistant(None, audio={"id": first["choices"][0]["message"]["audio"]["id"]})
            await http.post(URL, json={"messages": [user("a"), spoken, user("b")]})
            unknown = assistant(None, audio={"id": "audio_x"})
            return await http.post(URL, json={"messages": [unknown, user("b")]})

    refused = asyncio.run(talk())
    assert [part.text for part in omni.requests[1].messages[1].parts] == ["Hello you"]
    assert error_of(refused)["param"] == "messages.0.audio.id"


def test_transcripts_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = Transcripts(), [1000.0]
    monkeypatch.setattr("polymux.server.transcripts.time.time", lambda: now[0])
    names = [kept.new_id() for _ in range(MOST + 1)]
    for name in names:
        kept.keep(name, name)
    assert kept.get(names[0]) is None and kept.get(names[1]) == names[1] and kept.get(names[-1]) == names[-1]
    kept.keep("large", "x" * 5 * 2**20)
    assert kept.get("large") is None and kept.get(names[-1]) is None
    expires = kept.keep("last", "a")
    now[0] = expires + 1.0
    assert kept.get("last") is None

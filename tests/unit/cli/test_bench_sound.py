"""`polymux bench serve` where servers speak and write: what is sent, what counts, and what the numbers mean."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
from test_bench import Answer, FakeServer, bench, events, server  # noqa: F401

from polymux.bench import speech
from polymux.bench.endpoint import BadAnswer
from polymux.bench.records import Record
from polymux.bench.settings import RequestSettings
from polymux.bench.sound import Sound
from polymux.bench.speech import Speech
from polymux.bench.summary import summarize
from polymux.media.audio import encode_audio

RATE = 8000
SPEECH, CHAT = ("--endpoint", "/v1/audio/speech"), ("--endpoint", "/v1/chat/completions")


def wave(seconds: float, rate: int = RATE) -> bytes:
    return encode_audio(np.zeros((1, int(seconds * rate)), np.float32), rate, "wav")


def chunk(content: str | None = None, audio: bytes | None = None, **more: Any) -> dict[str, Any]:
    delta = {"content": content} | ({"audio": {"data": base64.b64encode(audio).decode()}} if audio else {})
    return {"choices": [{"delta": delta}]} | more


def usage(tokens: int, **details: int) -> dict[str, Any]:
    return {"usage": {"completion_tokens": tokens, "completion_tokens_details": details or None}}


def test_speech(server: FakeServer, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    server.answer = lambda body, i: (200, "audio/wav", wave(0.5))
    code, result = bench(*SPEECH, "--num-prompts", "3", "--voice", "anna", "--seed", "4", "--stream")
    summary = result["summary"]
    assert (code, summary["completed"], summary["sound"], summary["continuity"]) == (0, 3, 1.5, 1.0)
    assert all(0 < one["first_sound"] <= one["latency"] and one["sound"] == 0.5 for one in result["requests"])
    factors = sorted(one["latency"] / 0.5 for one in result["requests"])
    assert summary["real_time_factor"]["p50"] == pytest.approx(factors[1])
    assert (summary["underruns"], summary["silence"]["max"], summary["first_text"]) == (0, 0.0, None)
    for body in server.bodies:
        assert (body["voice"], body["response_format"], body["stream_format"]) == ("anna", "wav", "audio")
        assert set(body) == {"input", "model", "voice", "seed", "response_format", "stream_format"}
    printed = capsys.readouterr().out
    for name in ("time to first audio", "real-time factor", "underrun", "s of sound per second"):
        assert name in printed
    assert "pictures/s" not in printed
    code, result = bench(*SPEECH, "--num-prompts", "1")
    assert result["summary"]["first_sound"] is None and result["summary"]["real_time_factor"] is not None


def test_chat(server: FakeServer, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    parts = [chunk("a"), chunk("b"), chunk("c"), chunk(""), {"choices": []} | usage(4)]
    server.answer = lambda body, i: events(*parts, "[DONE]")
    code, result = bench(*CHAT, "--stream", "--num-prompts", "2", "--max-tokens", "9", "--goodput", "ttft:60000")
    summary = result["summary"]
    assert (code, summary["tokens"], summary["sound"], summary["attainment"]) == (0, 8, 0.0, 1.0)
    assert all(len(one["gaps"]) == 2 and 0 < one["first_text"] <= one["latency"] for one in result["requests"])
    assert summary["gap"]["max"] == max(gap for one in result["requests"] for gap in one["gaps"])
    assert summary["per_token"] is not None and summary["continuity"] is None
    (body,) = {json.dumps({k: v for k, v in body.items() if k != "messages"}) for body in server.bodies}
    assert json.loads(body) == {
        "model": "m1", "max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    printed = capsys.readouterr().out
    for name in ("time to first token", "inter-token latency", "time per output token", "tokens/s"):
        assert name in printed


def test_spoken_answers(server: FakeServer, bench: Any) -> None:  # noqa: F811
    bare = bytes(2 * 24000)  # a second
    parts = [
        chunk("a"),
        chunk("b"),
        chunk(audio=bare),
        chunk(audio=bare[:2400]),
        {"choices": []} | usage(9, text_tokens=2),
    ]
    server.answer = lambda body, i: events(*parts, "[DONE]")
    code, result = bench(
        *CHAT, "--stream", "--speak", "--voice", "anna", "--num-prompts", "1", "--goodput", "ttfa:60000"
    )
    summary = result["summary"]
    assert (code, summary["tokens"], summary["sound"], summary["continuity"]) == (0, 2, 1.05, 1.0)
    assert server.bodies[0]["audio"] == {"format": "pcm16", "voice": "anna"}
    assert server.bodies[0]["modalities"] == ["text", "audio"]

    message = {"content": "ab", "audio": {"data": base64.b64encode(wave(0.25)).decode()}}
    whole = json.dumps({"choices": [{"message": message}]} | usage(9, text_tokens=2)).encode()
    server.answer = lambda body, i: (200, "application/json", whole)
    _, result = bench(*CHAT, "--speak", "--num-prompts", "1")
    assert (result["summary"]["tokens"], result["summary"]["sound"]) == (2, 0.25)


KINDS: dict[str, tuple[tuple[str, ...], Answer]] = {
    "no_sound": (SPEECH, (200, "application/json", b"{}")),
    "broken_sound": (SPEECH, (200, "audio/wav", b"hello, I am no WAV file")),
    "no_answer": ((*CHAT, "--stream"), events("[DONE]")),
    "stream_error": ((*CHAT, "--stream"), events(chunk("a"), {"error": {"message": "no"}})),
    "invalid_answer": (CHAT, (200, "application/json", b"{")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_told_by_kind(server: FakeServer, bench: Any, kind: str) -> None:  # noqa: F811
    where, sent = KINDS[kind]
    server.answer = lambda body, i: sent
    code, result = bench(*where, "--num-prompts", "1", "--num-warmups", "0")
    assert (code, result["summary"]["errors"]) == (1, {kind: 1})


def test_an_answer_that_was_to_be_spoken_and_is_not(server: FakeServer, bench: Any) -> None:  # noqa: F811
    server.answer = lambda body, i: events(chunk("a"), "[DONE]")
    code, result = bench(*CHAT, "--stream", "--speak", "--num-prompts", "1", "--num-warmups", "0")
    assert (code, result["summary"]["errors"]) == (1, {"no_sound": 1})


@pytest.mark.parametrize("size", [1, 7, 44, 45, 10_000])
def test_a_wave_file_in_pieces(size: int) -> None:
    data = wave(0.1)
    riff = data[:12] + b"LIST\x04\x00\x00\x00INFO" + data[12:]  # a head may hold more
    for file in (data, riff):
        sound = Sound()
        assert sum(sound.came(file[i : i + size]) for i in range(0, len(file), size)) == pytest.approx(0.1)
        assert sound.seconds == pytest.approx(0.1)


def test_a_wave_file_without_a_rate() -> None:
    with pytest.raises(BadAnswer, match="does not say its rate"):
        Sound().came(wave(0.1)[:12] + b"data\x00\x00\x00\x00")


def test_somebody_who_plays_it_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half seconds of sound that come at 1.0, 1.2 (in time), 2.5 and 2.6 s: half a second of nothing, once."""
    clock = iter([1.0, 1.2, 2.5, 2.6])
    monkeypatch.setattr(speech.time, "perf_counter", lambda: next(clock))
    half = bytes(RATE)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield half

    headers = {"content-type": "audio/pcm", "x-sample-rate": str(RATE)}
    response = httpx2.Response(200, headers=headers, content=body())
    answer = asyncio.run(Speech(RequestSettings(stream=True), None).read(response))
    assert answer.playback is not None
    assert (answer.playback.first, answer.playback.breaks, answer.sound) == (1.0, 1, 2.0)
    assert answer.playback.silence == pytest.approx(0.5)


def test_the_summary_of_streams() -> None:
    def heard(latency: float, silence: float) -> Record:
        return Record(
            0, 0.0, 0.0, latency, status=200, sound=2.0, first_sound=0.25, underruns=int(silence > 0), silence=silence
        )  # fmt: skip

    written = Record(0, 0.0, 0.0, 1.0, status=200, tokens=5, first_text=0.1, gaps=[0.1, 0.3])
    summary = summarize([heard(1.0, 0.0), heard(3.0, 0.5), written], 4.0, {"ttfa": 0.3})
    assert summary.real_time_factor is not None and summary.real_time_factor.mean == 1.0
    assert (summary.underruns, summary.continuity, summary.sound_throughput, summary.token_throughput) == (
        1,
        0.5,
        1.0,
        1.25,
    )
    assert summary.per_token is not None and summary.per_token.mean == pytest.approx(0.1)  # four tokens in 0.4 s
    assert summary.goodput == 0.5  # two that were heard in time, in four seconds

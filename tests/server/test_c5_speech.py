"""Case C5: speech over HTTP, for real: formats, streams, voices, seeds, clients that leave.

OpenAI's client, the command and Python say the same. A tiny model speaks.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import struct
import subprocess
import sys
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server_process import MODEL, START_S, Server, error_of, serving, until

from polymux import Omni, SamplingParams
from polymux.config import stage_environment
from polymux.media.decode import MediaLimits, decode_audio

URL = "/v1/audio/speech"
BODY: dict[str, Any] = {
    "model": MODEL,
    "input": "Hello there. Second sentence.",
    "voice": "1",
    "seed": 1,
    "response_format": "wav",
}
LIMITS = MediaLimits(file_bytes=10**8, pixels=10**6, frames=100, seconds=100)
LONG = "one word more. " * 2000  # of half a minute of audio per hundred


def say(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(URL, json=BODY | fields)


def samples_of(file: bytes) -> np.ndarray[Any, Any]:
    with wave.open(io.BytesIO(file)) as opened:
        assert (opened.getnchannels(), opened.getframerate(), opened.getsampwidth()) == (1, 16000, 2)
        data = opened.readframes(opened.getnframes())
        assert opened.getnframes() == len(data) // 2
    return np.frombuffer(data, "<i2")


def test_wav_and_pcm(speaker: Server) -> None:
    whole = say(speaker)
    assert (whole.status_code, whole.headers["content-type"]) == (200, "audio/wav")
    file = whole.content
    assert file[:4] == b"RIFF" and struct.unpack("<I", file[4:8])[0] == len(file) - 8 and file.count(b"RIFF") == 1
    samples = samples_of(file)
    assert len(file) == 44 + 2 * len(samples)  # nothing after the data
    bare = say(speaker, response_format="pcm")
    assert bare.headers["content-type"] == "audio/pcm" and bare.content == samples.tobytes()
    assert float(whole.headers["x-duration"]) == pytest.approx(len(samples) / 16000, abs=1e-6)


@pytest.mark.parametrize(
    ("format", "begins", "kind"),
    [("flac", b"fLaC", "audio/flac"), ("mp3", b"ID3", "audio/mpeg"), ("opus", b"OggS", "audio/ogg")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_formats(speaker: Server, format: str, begins: bytes, kind: str, stream: bool) -> None:
    answer = say(speaker, response_format=format, stream=stream)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.content.startswith(begins) and ("content-length" in answer.headers) != stream
    wanted = len(samples_of(say(speaker).content)) / 16000
    read = decode_audio(answer.content, LIMITS)
    assert wanted <= read.samples.shape[1] / read.sample_rate < wanted + 0.15


def test_a_stream_is_the_whole(speaker: Server) -> None:
    for sentences in (1, 2, 10):
        text = " ".join(["Hello there.", "Second sentence."] * 5)[: 14 * sentences].strip()
        whole = say(speaker, input=text)
        with speaker.http.stream("POST", URL, json=BODY | {"input": text, "stream": True}) as answer:
            assert answer.headers["transfer-encoding"] == "chunked" and answer.headers["x-seed"] == "1"
            file = b"".join(answer.iter_raw())
        assert file[:4] == b"RIFF" and file.count(b"RIFF") == 1
        assert file[4:8] == file[40:44] == b"\xff\xff\xff\xff" and file[44:] == whole.content[44:]


def test_where_the_time_went(speaker: Server) -> None:
    profile = json.loads(say(speaker, profile=True).headers["x-profile"])
    assert profile["components"] and profile["total"] >= profile["computing"] > 0 and "steps" not in profile
    assert "x-profile" not in say(speaker).headers
    for how in ({"stream": True}, {"stream_format": "sse"}):
        assert error_of(say(speaker, profile=True, **how))["param"] == "profile"


def test_events(speaker: Server) -> None:
    whole = say(speaker, response_format="pcm")
    answer = say(speaker, response_format="pcm", stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == whole.content
    usage = events[-1]["usage"]
    assert usage["input_tokens"] > 0 and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_seeds_in_company(speaker: Server) -> None:
    alone = say(speaker).content
    assert say(speaker, seed=2).content != alone
    drawn = say(speaker, seed=None)
    assert say(speaker, seed=int(drawn.headers["x-seed"])).content == drawn.content
    texts = [BODY["input"], "Another one. And more.", "Short.", BODY["input"]] * 2
    seeds = [1, 2, 3, 1] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: say(speaker, input=job[0], seed=job[1]), zip(texts, seeds, strict=True)))
    assert [answer.content == alone for answer in answers] == [True, False, False, True] * 2


def test_speed(speaker: Server) -> None:
    plain = len(samples_of(say(speaker).content))
    for speed in (0.25, 0.5, 2, 4):
        assert abs(len(samples_of(say(speaker, speed=speed).content)) - plain / speed) <= 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", "xyz"), ("response_format", "aac"), ("speed", 0), ("speed", -1), ("speed", 99),
        ("voice", "alloy"), ("voice", 1), ("voice", {"name": "1"}), ("input", ""), ("input", None), ("input", "..."),
        ("input", "你好"), ("input", "a" * 40_000), ("seed", "x"), ("seed", 2**64), ("language", "en"),
        ("instructions", "angrily"), ("temperature", 1), ("stream_format", "banana"), ("max_new_tokens", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refused(speaker: Server, field: str, value: Any, stream: bool) -> None:
    before = speaker.outcomes()["refused"]
    answer = say(speaker, **{"stream": stream, field: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field and error_of(answer)["message"].startswith((field, "unknown"))
    assert speaker.outcomes()["refused"] == before + 1


def test_other_refusals(speaker: Server) -> None:
    assert say(speaker, model="other").status_code == 404
    assert error_of(say(speaker, stream=False, stream_format="sse"))["param"] == "stream_format"
    assert error_of(say(speaker, tone="x"))["param"] == "tone"
    for rate in (0, -1, 1e-9):
        assert error_of(say(speaker, extra_args={"speaking_rate": rate}))["param"] == "extra_args.speaking_rate"
    does = error_of(say(speaker, language="en"))["message"]
    assert "voice" in does and "ref_audio" not in does  # it names what the model takes, and nothing else
    heard = speaker.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", say(speaker).content)})
    assert heard.status_code == 400 and error_of(heard)["param"] == "model"
    pictures = speaker.post({"model": MODEL, "prompt": "a"})
    assert pictures.status_code == 400 and error_of(pictures)["param"] == "model"


def test_voices(speaker: Server) -> None:
    voices = speaker.http.get("/v1/audio/voices").json()
    assert voices == {"voices": ["0", "1"], "default": "0", "languages": [], "uploaded_voices": []}
    (model,) = speaker.http.get("/v1/models").json()["data"]
    assert model["capabilities"]["voices"] == ["0", "1"] and "speed" in model["capabilities"]["fields"]
    first, named, other = (say(speaker, voice=voice).content for voice in (None, {"id": "0"}, "1"))
    assert first == named != other


def test_a_client_that_leaves(speaker: Server) -> None:
    before = speaker.outcomes()["aborted"]
    for _ in range(5):
        with (
            contextlib.suppress(httpx.HTTPError),
            speaker.http.stream("POST", URL, json=BODY | {"input": LONG, "stream": True}) as answer,
        ):
            assert answer.status_code == 200 and next(answer.iter_raw())
    until(lambda: speaker.running() == speaker.waiting() == 0)
    assert speaker.outcomes()["aborted"] == before + 5
    assert say(speaker).status_code == 200


def test_the_metrics_count_what_was_heard(speaker: Server) -> None:
    def heard() -> float:
        return speaker.metrics()["polymux:audio_seconds_total"]

    before, answer = heard(), say(speaker)
    assert heard() - before == pytest.approx(float(answer.headers["x-duration"]), abs=1e-4)


def test_openai_client(speaker: Server, tmp_path: Path) -> None:
    wanted = say(speaker).content
    with openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0) as client:
        speech = client.audio.speech
        asked: dict[str, Any] = {"model": MODEL, "voice": "1", "input": BODY["input"], "extra_body": {"seed": 1}}
        assert speech.create(**asked, response_format="wav").content == wanted
        assert speech.create(**asked).content.startswith(b"ID3")
        with speech.with_streaming_response.create(**asked, response_format="wav") as response:
            response.stream_to_file(tmp_path / "a.wav")
        assert (tmp_path / "a.wav").read_bytes() == wanted
        with speech.with_streaming_response.create(**asked, response_format="pcm", stream_format="audio") as response:
            assert b"".join(response.iter_bytes()) == wanted[44:]
        with pytest.raises(openai.BadRequestError) as error:
            speech.create(**asked | {"voice": "alloy"})
        assert error.value.param == "voice"


def test_the_command(speaker: Server, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    wanted = say(speaker).content
    words = ["--model", str(tiny_checkpoint("vits")), "--voice", "1", "--seed", "1"]
    command = [sys.executable, "-m", "polymux.cli", "speak", BODY["input"], *words]

    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=stage_environment(), timeout=START_S
    )
    assert (done.returncode, done.stdout) == (0, "out.wav\n"), done.stderr
    assert (tmp_path / "out.wav").read_bytes() == wanted and "seed: 1" in done.stderr


def test_python(speaker: Server, tiny_checkpoint: Callable[..., Path]) -> None:
    wanted = samples_of(say(speaker).content)
    with Omni(model=tiny_checkpoint("vits")) as omni:
        assert omni.capabilities is not None and omni.capabilities.voices == ("0", "1")
        params = SamplingParams(voice="1", seed=1)
        good, bad, plain = omni.generate([BODY["input"], "你好", "hello"], [params, params, SamplingParams()])
    assert good.error is None and good.sample_rate == 16000 and good.seeds == [1]
    (samples,) = good.audio
    assert samples.shape == (1, len(wanted)) and good.modality == "audio"
    assert np.array_equal((samples[0].clip(-1, 1).astype(np.float64) * 32767).round(), wanted)
    assert bad.error is not None and bad.error.param == "prompt" and len(plain.audio) == 1


def test_music(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "music with drums", "seed": 1, "seconds": 0.02, "temperature": 0.9}
    with serving(tiny_checkpoint("musicgen"), tmp_path) as server:
        made = server.http.post("/v1/audio/generate", json=body)
        again = server.http.post("/v1/audio/generate", json=body | {"response_format": "flac"})
        bad = {"num_inference_steps": 3, "negative_prompt": "a", "seconds": 1000, "max_new_tokens": 5, "top_k": 0}
        refused = {name: server.http.post("/v1/audio/generate", json=body | {name: v}) for name, v in bad.items()}
        speech, voices = server.http.post(URL, json=BODY | {"voice": None}), server.http.get("/v1/audio/voices")
    assert made.status_code == again.status_code == 200 and made.headers["x-duration"] == "0.020000"
    for name, answer in refused.items():
        wanted = "seconds" if name == "max_new_tokens" else name
        assert answer.status_code == 400 and error_of(answer)["param"] == wanted
    assert error_of(speech)["param"] == error_of(voices)["param"] == "model"

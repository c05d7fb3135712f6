"""Voices over HTTP, for real: uploads, what is refused, a restart, and speech with them, in every way to ask for it."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server_process import MODEL, START_S, Server, error_of, serving
from websockets.sync.client import connect

from polymux.config import stage_environment
from polymux.errors import ConfigError
from polymux.server_config import VoiceConfig

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
RATE = 24000
SAID = "what I said"
BODY: dict[str, Any] = {
    "input": "Hello there. Second sentence.", "seed": 1, "response_format": "wav", "max_new_tokens": 6,
    "temperature": 0.8,
}  # fmt: skip


def wav(samples: int = 960, rate: int = RATE, pitch: float = 440) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        tone = 9000 * np.sin(np.arange(samples) * pitch * 2 * np.pi / rate)
        out.writeframes(tone.astype("<i2").tobytes())
    return file.getvalue()


def url(file: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(file).decode()


def upload(server: Server, file: bytes | None = None, **fields: Any) -> httpx.Response:
    fields = {"name": "anna", "consent": "recording 7", "ref_text": SAID} | fields
    files = None if file is None else {"audio_sample": ("a.wav", file, "audio/wav")}
    data = {name: value for name, value in fields.items() if value is not None}
    if files is None:  # a form all the same
        return server.http.post(VOICES, files={name: (None, value) for name, value in data.items()})
    return server.http.post(VOICES, data=data, files=files)


def say(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(SPEECH, json=BODY | fields)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices") / "kept"


@pytest.fixture(scope="module")
def listener(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, store: Path
) -> Iterator[Server]:
    flags = ("--voice-store", str(store), "--max-uploaded-voices", "3", "--max-voice-bytes", "20000")
    with serving(tiny_checkpoint("csm"), tmp_path_factory.mktemp("listener"), *flags) as running:
        yield running


def test_a_voice_is_uploaded_and_speaks_and_goes(listener: Server, store: Path) -> None:
    made = upload(listener, wav(), speaker_description="a tone")
    assert made.status_code == 200, made.text
    voice = made.json()["voice"]
    assert made.json()["success"] is True and voice["name"] == "anna" and voice["consent"] == "recording 7"
    assert (voice["seconds"], voice["sample_rate"], voice["embedding_dim"]) == (0.04, RATE, None)
    listed = listener.http.get(VOICES).json()
    assert listed["uploaded_voices"] == [voice] and listed["voices"] == [*map(str, range(10)), "anna"]
    assert listed["default"] == "0" and sorted(p.name for p in store.iterdir()) == [".lock", "anna.safetensors"]

    spoken = say(listener, voice="anna")
    assert spoken.status_code == 200 and spoken.content.count(b"RIFF") == 1
    same = say(listener, ref_audio=url(wav()), ref_text=SAID)
    assert same.content == spoken.content == say(listener, voice={"id": "anna"}).content
    other = say(listener, ref_audio=url(wav()), ref_text="quite another text than that one was").content
    assert say(listener).content != spoken.content != other
    streamed = say(listener, voice="anna", stream=True)
    assert streamed.content[44:] == spoken.content[44:]

    for fields, param in (
        ({"voice": "anna", "ref_text": "x"}, "ref_text"),
        ({"voice": "anna", "ref_audio": url(wav()), "ref_text": "x"}, "ref_audio"),
        ({"voice": "anna", "speaker_embedding": [1.0]}, "speaker_embedding"),
        ({"voice": "anna", "input": "hello <|AUDIO|>"}, "input"),
    ):
        answer = say(listener, **fields)
        assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text

    gone = listener.http.delete(f"{VOICES}/anna")
    assert gone.status_code == 200 and gone.json()["success"] is True
    again = listener.http.delete(f"{VOICES}/anna")
    assert again.status_code == 404 and error_of(again)["code"] == "voice_not_found"
    assert listener.http.get(VOICES).json()["uploaded_voices"] == [] and error_of(say(listener, voice="anna"))["param"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": "3"}, "name"), ({"name": "../anna"}, "name"), ({"name": ".anna"}, "name"), ({"name": ""}, "name"),
        ({"name": "a" * 65}, "name"), ({"name": "a/b"}, "name"), ({"name": "a\x00"}, "name"),
        ({"name": "jürgen"}, "name"),
        ({"name": None}, "name"), ({"consent": None}, "consent"), ({"consent": "false"}, "consent"),
        ({"consent": " "}, "consent"), ({"ref_text": " "}, "ref_text"), ({"tone": "x"}, "tone"),
        ({"speaker_embedding": "[1.0, 2.0]"}, "audio_sample"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused(listener: Server, store: Path, fields: dict[str, Any], param: str) -> None:
    answer = upload(listener, wav(), **fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text
    assert not list(store.glob("*")) or [p.name for p in store.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "file", [b"", b"RIFF", wav()[:-200], b"\x89PNG\r\n", wav(0), wav(20_000), wav(31 * 100, rate=100)],
    ids=["empty", "head", "cut", "png", "silent", "large", "long"],
)  # fmt: skip
def test_a_wrong_file_is_refused(listener: Server, file: bytes) -> None:
    answer = upload(listener, file)
    assert answer.status_code == 400 and error_of(answer)["param"] == "audio_sample", answer.text


def test_other_uploads_that_are_refused(listener: Server) -> None:
    assert error_of(upload(listener))["param"] == "audio_sample"
    assert error_of(upload(listener, ref_text=None, speaker_embedding="[1.0]"))["param"] == "speaker_embedding"
    assert error_of(upload(listener, audio_sample="file:///etc/passwd"))["param"] == "audio_sample"
    assert error_of(upload(listener, audio_sample="http://127.0.0.1:1/a.wav"))["param"] == "audio_sample"
    assert listener.http.post(VOICES, json={"name": "anna"}).status_code == 415
    assert listener.http.delete(f"{VOICES}/%2e%2e%2fanna").status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ref_audio": url(wav())}, "ref_text"), ({"ref_text": "x"}, "ref_text"), ({"ref_audio": "a.wav"}, "ref_audio"),
        ({"ref_audio": "file:///etc/passwd", "ref_text": "x"}, "ref_audio"),
        ({"ref_audio": "http://127.0.0.1:1/a.wav", "ref_text": "x"}, "ref_audio"),
        ({"ref_audio": "http://169.254.169.254/a.wav", "ref_text": "x"}, "ref_audio"),
        ({"ref_audio": url(b"no sound"), "ref_text": "x"}, "ref_audio"),
        ({"ref_audio": url(wav(31 * 100, rate=100)), "ref_text": "x"}, "ref_audio"),
        ({"speaker_embedding": [1.0]}, "speaker_embedding"), ({"ref_audio": 1}, "ref_audio"),
    ],
)  # fmt: skip
def test_a_wrong_reference_is_refused(listener: Server, fields: dict[str, Any], param: str) -> None:
    answer = say(listener, **fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text


def test_openai_client(listener: Server) -> None:
    with openai.OpenAI(base_url=f"{listener.url}/v1", api_key="none", max_retries=0) as client:
        voices = client.audio.voices
        form = {"ref_text": SAID}
        made = voices.create(audio_sample=("a.wav", wav()), consent="cons_1", name="olga", extra_body=form)
        assert (made.id, made.name, made.object, made.type) == ("olga", "olga", "audio.voice", "audio_sample")
        asked = {name: value for name, value in BODY.items() if name not in ("input", "response_format")}
        spoken = client.audio.speech.create(
            model=MODEL, voice={"id": made.id}, input=BODY["input"], response_format="wav", extra_body=asked
        )
        assert spoken.content == say(listener, voice="olga").content
        with pytest.raises(openai.BadRequestError) as refused:
            voices.create(name="ida", prompt="a calm voice", type="prompt")
        assert refused.value.param in ("type", "prompt", "consent")
        assert voices.delete("olga").deleted is True


def test_there_are_so_many_and_a_restart_keeps_them(
    listener: Server, store: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("ben", "cleo", "dora"):
        file = wav(4800 if name == "dora" else 960, pitch=200 + len(name))
        assert upload(listener, file, name=name, ref_text=None).status_code == 200
    full, twice = upload(listener, wav(), name="emil"), upload(listener, wav(), name="ben")
    assert full.status_code == 507 and "--max-uploaded-voices" in error_of(full)["message"]
    assert twice.status_code == 400 and error_of(twice)["param"] == "name"
    missing = say(listener, voice="ben")
    assert missing.status_code == 400 and error_of(missing)["param"] == "ref_text"
    spoken = say(listener, voice="ben", ref_text=SAID)
    assert spoken.status_code == 200
    (store / "broken.safetensors").write_bytes(b"x")
    (store / ".partial-0").write_bytes(b"x")
    flags = ("--voice-store", str(store), "--no-warmup", "--max-ref-audio-seconds", "0.1")
    with serving(tiny_checkpoint("csm"), tmp_path, *flags) as restarted:
        listed = restarted.http.get(VOICES).json()["uploaded_voices"]
        assert [voice["name"] for voice in listed] == ["ben", "cleo", "dora"]
        assert say(restarted, voice="ben", ref_text=SAID).content == spoken.content
        assert say(restarted, voice="broken").status_code == 500 and not (store / ".partial-0").exists()
        for error in long_voice(restarted, voice="dora", ref_text=SAID):
            assert (error["param"], error["code"]) == ("voice", "invalid_value")
            assert error["message"].startswith("voice='dora': 0.20 s: allowed are 0.1 "), error


def long_voice(server: Server, **fields: str) -> Iterator[dict[str, Any]]:
    """What each way to ask for speech says of a voice that was uploaded when longer ones were allowed."""
    yield error_of(say(server, **fields))
    yield error_of(say(server, stream=True, **fields))
    yield error_of(say(server, stream_format="sse", **fields))
    batch = server.http.post(f"{SPEECH}/batch", json={"items": [{"input": "a"}], "seed": 1} | fields).json()
    yield batch["results"][0]["error"]
    with connect(f"{server.url.replace('http', 'ws')}{SPEECH}/stream") as socket:
        for message in (
            {"type": "session.config"} | fields,
            {"type": "input.text", "text": "a"},
            {"type": "input.done"},
        ):
            socket.send(json.dumps(message))
        heard = [json.loads(socket.recv()) for _ in range(2)]
        yield heard[1]["error"]


def test_the_command(listener: Server, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    wanted = say(listener, ref_audio=url(wav()), ref_text=SAID).content
    (tmp_path / "ref.wav").write_bytes(wav())
    words = ["--model", str(tiny_checkpoint("csm")), "--seed", "1", "--max-new-tokens", "6", "--temperature", "0.8"]
    heard = ["--ref-audio", "ref.wav", "--ref-text", SAID]
    command = [sys.executable, "-m", "polymux.cli", "speak", BODY["input"], *words, *heard, "--no-warmup"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=stage_environment(), timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.wav").read_bytes() == wanted


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    command = [sys.executable, "-m", "polymux.cli", "serve", "demo", "--port", "0", "--voice-store"]
    done = subprocess.run([*command, str(tmp_path / "file")], capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 2 and "cannot be used for voices" in done.stderr, done.stderr
    with pytest.raises(ConfigError):
        VoiceConfig(voice_store=" ")

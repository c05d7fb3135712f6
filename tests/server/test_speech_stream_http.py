"""WS /v1/audio/speech/stream, for real: a text that comes in parts is spoken as it is in one piece."""

from __future__ import annotations

import base64
import io
import json
import struct
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import MODEL, Server, serving, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from polymux.media.decode import MediaLimits, decode_audio

PATH, SINGLE = "/v1/audio/speech/stream", "/v1/audio/speech"
CONFIG: dict[str, Any] = {"type": "session.config", "model": MODEL, "voice": "1", "seed": 1, "response_format": "pcm"}
TEXT = "Hello there. Second sentence, with a clause. Dr. Smith has a.b of it! And an end without a mark"
LIMITS = MediaLimits(file_bytes=10**8, pixels=10**6, frames=100, seconds=100)


@contextmanager
def session(server: Server, **config: Any) -> Iterator[ClientConnection]:
    with connect(server.url.replace("http", "ws") + PATH, open_timeout=30, max_size=None) as socket:
        send(socket, **CONFIG | config)
        yield socket


def send(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def say(socket: ClientConnection, *parts: str) -> None:
    for part in parts:
        send(socket, type="input.text", text=part)
    send(socket, type="input.done")


def heard(socket: ClientConnection) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The events up to the end of a text, and the sound of each sentence."""
    events: list[dict[str, Any]] = []
    sounds: list[bytes] = []
    while not events or events[-1]["type"] not in ("session.done", "error"):
        message = socket.recv(timeout=30)
        if isinstance(message, bytes):
            sounds[-1] += message
            continue
        events.append(json.loads(message))
        if events[-1]["type"] == "audio.start":
            sounds.append(b"")
        if events[-1]["type"] == "audio.done":
            assert events[-1]["total_bytes"] == len(sounds[-1])
    return events, sounds


def alone(server: Server, text: str, **fields: Any) -> bytes:
    body = {name: value for name, value in CONFIG.items() if name != "type"} | {"input": text} | fields
    answer = server.http.post(SINGLE, json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("size", [1, 7, len(TEXT)])
def test_the_sound_is_that_of_the_whole_text(speaker: Server, size: int) -> None:
    with session(speaker) as socket:
        say(socket, *(TEXT[i : i + size] for i in range(0, len(TEXT), size)))
        events, sounds = heard(socket)
        assert b"".join(sounds) == alone(speaker, TEXT)
        starts = [event for event in events if event["type"] == "audio.start"]
        assert " ".join(event["sentence_text"] for event in starts) == TEXT
        assert [event["sentence_index"] for event in starts] == [0, 1, 2, 3]
        assert all((e["seed"], e["sample_rate"], e["format"]) == (1, 16000, "pcm") for e in starts)
        assert events[-1] == {"type": "session.done", "utterance_index": 0, "total_sentences": 4}
        say(socket, "Another one.")  # the same session
        events, sounds = heard(socket)
        assert events[0]["utterance_index"] == 1 and sounds == [alone(speaker, "Another one.")]
        say(socket)
        assert heard(socket) == ([{"type": "session.done", "utterance_index": 2, "total_sentences": 0}], [])


def test_a_sentence_is_spoken_before_the_text_is_complete(speaker: Server) -> None:
    with session(speaker) as socket:
        send(socket, type="input.text", text="Hello there. And")
        start = json.loads(socket.recv(timeout=30))
        sound, done = socket.recv(timeout=30), json.loads(socket.recv(timeout=30))
        assert start["sentence_text"] == "Hello there." and done["type"] == "audio.done" and done["error"] is None
        assert sound == alone(speaker, "Hello there.")
        say(socket, " more.")
        assert heard(socket)[1] == [alone(speaker, "And more.")]


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_formats(speaker: Server, format: str) -> None:
    with session(speaker, response_format=format) as socket:
        say(socket, "Hello there. Second sentence.")
        _, sounds = heard(socket)
    assert len(sounds) == 2
    for sound, text in zip(sounds, ("Hello there.", "Second sentence."), strict=True):
        bare = alone(speaker, text)
        if format == "wav":
            assert sound.count(b"RIFF") == 1 and sound[4:8] == sound[40:44] == b"\xff\xff\xff\xff"
            assert sound[44:] == bare and struct.unpack("<I", sound[24:28]) == (16000,)
        else:
            read = decode_audio(sound, LIMITS)
            seconds = read.samples.shape[1] / read.sample_rate
            assert len(bare) / 32000 <= seconds < len(bare) / 32000 + 0.15


def test_many_sessions_at_once(speaker: Server) -> None:
    texts = [f"Hello number {'x' * i}. Second sentence." for i in range(8)]

    def speak(text: str) -> list[bytes]:
        with session(speaker) as socket:
            say(socket, *text)
            return heard(socket)[1]

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(speak, texts))
    assert [b"".join(sounds) for sounds in made] == [alone(speaker, text) for text in texts]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xyz"}, "response_format"), ({"voice": 1}, "voice"), ({"model": "other"}, "model"),
        ({"stream": True}, "stream"), ({"input": "a"}, "input"),
        ({"ref_audio": "data:,", "ref_text": "a"}, "ref_audio"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_an_error(speaker: Server, fields: dict[str, Any], param: str) -> None:
    with session(speaker, **fields) as socket:
        error = json.loads(socket.recv(timeout=30))
        assert error["type"] == "error" and error["error"]["param"] == param
        send(socket, **CONFIG)
        say(socket, "Hello.")
        assert len(heard(socket)[1]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"voice": "alloy"}, "voice"),
        ({"speed": 99}, "speed"),
        ({"language": "en"}, "language"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_what_the_model_refuses_ends_a_sentence(speaker: Server, fields: dict[str, Any], param: str) -> None:
    with session(speaker, **fields) as socket:
        say(socket, "Hello.")
        events, sounds = heard(socket)
        assert events[1]["type"] == "audio.done" and events[1]["error"]["param"] == param and sounds == [b""]
        send(socket, **CONFIG)
        say(socket, "One 你好. Two.")
        events, sounds = heard(socket)
        assert [e["error"] and e["error"]["param"] for e in events if e["type"] == "audio.done"] == ["input", None]
        assert sounds[1] == alone(speaker, "Two.")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None), ("[]", "type"), ("5", "type"), ('{"type": "x"}', "type"), ('{"type": 1}', "type"), ("\x00", None),
        ('{"type": "input.text"}', "text"), ('{"type": "input.text", "text": 1}', "text"), (b"\x00\x01", None),
        ('{"type": "input.done", "x": 1}', "x"), ('{"type": "input.text", "text": "' + "a" * 140_000 + '"}', "type"),
        ('{"type": "input.text", "text": "' + "a" * 40_000 + '"}', "text"), ("[" * 100, None),
        ('{"type": "input.text", "type": "input.done"}', "type"), ('{"type": "input.text", "text": "\\ud800"}', None),
    ],
)  # fmt: skip
def test_a_malformed_message_is_an_error_and_no_more(speaker: Server, message: Any, param: str | None) -> None:
    with session(speaker) as socket:
        socket.send(message)
        error = json.loads(socket.recv(timeout=30))
        assert error["type"] == "error" and set(error["error"]) == {"message", "type", "param", "code"}
        assert error["error"]["param"] == param and error["error"]["type"] == "invalid_request_error"
        say(socket, "Hello.")
        assert heard(socket)[1] == [alone(speaker, "Hello.")]


def test_leaving_cancels(speaker: Server) -> None:
    before = speaker.outcomes()["aborted"]
    for close in (True, False, True):
        with session(speaker) as socket:
            say(socket, "one word more, " * 1000 + ". ")
            while not isinstance(socket.recv(timeout=30), bytes):
                pass
            if close:
                send(socket, type="session.close")
                with pytest.raises(ConnectionClosed) as closed:
                    while True:
                        socket.recv(timeout=30)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
            else:
                socket.socket.close()  # without a word
    until(lambda: speaker.running() == speaker.waiting() == 0)
    assert speaker.outcomes()["aborted"] == before + 3
    metrics = speaker.metrics()
    key = f'polymux:http_requests_total{{method="WEBSOCKET",route="{PATH}",status="101"}}'
    assert metrics[key] >= 3 and " WEBSOCKET " in speaker.log.read_text()


def test_a_message_that_is_too_large_ends_the_session(speaker: Server) -> None:
    with session(speaker) as socket, pytest.raises((ConnectionClosed, OSError)):
        socket.send("x" * (5 * 2**20))
        while True:
            socket.recv(timeout=30)
    with session(speaker) as socket:
        say(socket, "Hello.")
        assert len(heard(socket)[1]) == 1


def test_speakers_of_a_dialogue(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A mark holds for the sentences after it too. And a recording speaks in every sentence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(44100)
        out.writeframes((9000 * np.sin(np.arange(900) / 16)).astype("<i2").tobytes())
    reference = "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
    config: dict[str, Any] = {"voice": None, "max_new_tokens": 12}
    with serving(tiny_checkpoint("dia"), tmp_path, "--no-warmup") as server:
        text = "[S2] Hello. My friend. [S1] Good day."
        for fields in (config, config | {"ref_audio": reference, "ref_text": "so"}):
            with session(server, **fields) as socket:
                say(socket, *text)
                _, sounds = heard(socket)
            assert len(sounds) == 3 and b"".join(sounds) == alone(server, text, **fields)

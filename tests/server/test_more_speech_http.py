"""Over HTTP: a model that speaks with a recording's voice without knowing its words."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from server_process import MODEL, Server, error_of, serving

from polymux.media.audio import encode_audio

RATE = 24000
TEXT = "Good evening to you. It is late, my friend."


def tone(rate: int, seconds: float) -> bytes:
    wave = 0.3 * np.sin(np.arange(int(rate * seconds)) * 440 * 2 * np.pi / rate)
    return encode_audio(wave.astype(np.float32)[np.newaxis], rate, "wav")


def say(server: Server, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": TEXT, "response_format": "wav", "seed": 1}
    return server.http.post("/v1/audio/speech", json=body | fields)


def test_speech(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    heard = "data:audio/wav;base64," + base64.b64encode(tone(RATE, 0.05)).decode()
    flags = ("--voice-store", str(tmp_path / "voices"))
    with serving(tiny_checkpoint("pocket-tts"), tmp_path, *flags) as server:
        whole = say(server)
        assert whole.status_code == 200, whole.text
        assert say(server, stream=True).content[44:] == whole.content[44:] and len(whole.content) > 100
        assert say(server, seed=2).content != whole.content
        cloned = say(server, ref_audio=heard)
        assert cloned.status_code == 200 and cloned.content != whole.content
        fields = {"name": "anna", "consent": "recording 7", "ref_text": "what I said"}
        made = server.http.post("/v1/audio/voices", data=fields, files={"audio_sample": ("a.wav", tone(RATE, 0.05))})
        assert made.status_code == 200, made.text
        assert say(server, voice="anna").content == cloned.content
        for wrong in ({"ref_audio": heard, "ref_text": "a"}, {"top_k": 5}, {"instructions": "slowly"}, {"voice": "x"}):
            answer, param = say(server, **wrong), list(wrong)[-1]
            assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text

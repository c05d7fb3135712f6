"""POST /v1/audio/generate against a generator that computes nothing: words, formats, headers, errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fake_omni import CAPABILITIES, FakeOmni, client
from fake_video_omni import PROFILE

from polymux.errors import GenerationError
from polymux.media.audio import encode_audio
from polymux.omni_output import OmniRequestOutput
from polymux.request import ArrayData, LoRARequest, OmniDiffusionSamplingParams, Request

URL = "/v1/audio/generate"
BASE: dict[str, Any] = {"prompt": "rain on a tin roof", "seed": 5}
MAKES_SOUND = msgspec.structs.replace(
    CAPABILITIES,
    modality="audio",
    lora=True,
    arguments=("prompt", "negative_prompt", "seconds", "num_inference_steps", "guidance_scale", "eta"),
    max_seconds=30.0,
    media={"src_audio": 1},
    sample_rate=8000,
)
SOUND_URL = "data:audio/wav;base64," + base64.b64encode(encode_audio(np.zeros((2, 400)), 16000, "wav")).decode()


class SoundingOmni(FakeOmni):
    """Its sound is as long as was asked, half a second else, and three samples of it are too loud."""

    def __init__(self, **engine_args: Any) -> None:
        super().__init__(**engine_args)
        self.capabilities = MAKES_SOUND
        self.channels, self.sample_rate = 2, 8000

    def _output(self, request: Request) -> OmniRequestOutput:
        length = round((request.params.seconds or 0.5) * 8000)
        samples = np.linspace(-0.5, 0.5, self.channels * length, dtype=np.float32).reshape(self.channels, length)
        samples[0, :3] = 1.5
        seed = 7 if request.params.seed is None else request.params.seed
        return OmniRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            modality="audio",
            audio=[samples],
            sample_rate=self.sample_rate,
            seeds=[seed],
            profile=PROFILE
            if isinstance(request.params, OmniDiffusionSamplingParams) and request.params.profile
            else None,
        )


def post(omni: FakeOmni | None = None, server: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni or SoundingOmni(), **(server or {})) as http:
            return await http.post(URL, json={k: v for k, v in (BASE | body).items() if v is not ...})

    return asyncio.run(send())


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def test_a_wav_file_and_what_is_in_it() -> None:
    response = post(seconds=0.25)
    assert response.status_code == 200 and response.headers["content-type"] == "audio/wav"
    told = {name: response.headers[f"x-{name}"] for name in ("sample-rate", "channels", "duration", "seed")}
    assert told == {"sample-rate": "8000", "channels": "2", "duration": "0.250000", "seed": "5"}
    assert response.headers["x-clipped-samples"] == "3" and "x-request-id" in response.headers
    with wave.open(io.BytesIO(response.content)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 2000)
        frames = np.frombuffer(file.readframes(2000), "<i2").reshape(-1, 2)
    assert frames[:3, 0].tolist() == [32767] * 3 and frames[-1, 1] == 16384
    assert len(response.content) == int(response.headers["content-length"])


def test_where_the_time_went() -> None:
    told = json.loads(post(profile=True).headers["x-profile"])
    assert (told["total"], told["components"][0]["phase"], "steps" in told) == (3.0, "denoise", False)
    assert "x-profile" not in post(profile=False).headers


@pytest.mark.parametrize(
    ("format", "begins", "kind"),
    [
        ("wav", b"RIFF", "audio/wav"),
        ("flac", b"fLaC", "audio/flac"),
        ("mp3", b"ID3", "audio/mpeg"),
        ("opus", b"OggS", "audio/ogg"),
        ("pcm", b"\xff\x7f", "audio/pcm"),
    ],
)
def test_every_format_is_what_it_says(format: str, begins: bytes, kind: str) -> None:
    response = post(response_format=format)
    assert response.content.startswith(begins) and response.headers["content-type"] == kind
    if format == "pcm":
        assert len(response.content) == 4000 * 2 * 2


def test_everything_reaches_the_generator() -> None:
    omni = SoundingOmni()
    fields = {"num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "noise", "extra_args": {"eta": 1}}
    post(omni, seconds=12.5, **fields)
    (request,) = omni.requests
    params = request.params
    assert (request.prompt, request.negative_prompt) == (BASE["prompt"], "noise")
    assert (params.seed, params.seconds, params.num_inference_steps, params.guidance_scale) == (5, 12.5, 3, 2.5)
    assert params.extra_args == {"eta": 1}


def test_adapters_reach_the_generator(tmp_path: Path) -> None:
    omni, file = SoundingOmni(), tmp_path / "a.safetensors"
    file.write_bytes(b"")
    allowed = {"allowed_lora_path": (str(tmp_path),)}
    assert post(omni, allowed, lora={"path": file.name, "scale": 0.5}).status_code == 200
    assert omni.requests[0].params.lora == (LoRARequest(path=str(file), scale=0.5),)
    assert error(post(SoundingOmni(), allowed, lora={"path": "../a"}))["param"] == "lora"
    assert "--allowed-lora-path" in error(post(SoundingOmni(), lora=[{"path": "a"}]))["message"]


def test_a_model_that_takes_no_adapters_gives_them_no_names(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    omni, named = SoundingOmni(), {"lora_name": "ink", "lora_path": "a.safetensors"}

    async def send() -> httpx.Response:
        async with client(omni, allowed_lora_path=(str(tmp_path),)) as http:
            return await http.post("/v1/load_lora_adapter", json=named)

    assert asyncio.run(send()).status_code == 200
    omni.capabilities = msgspec.structs.replace(MAKES_SOUND, lora=False)
    refused = error(asyncio.run(send()))
    assert refused["param"] == "lora_name" and "takes no LoRA" in refused["message"]


def test_input_sound_counts_against_what_requests_hold_together() -> None:
    refused = post(SoundingOmni(), server={"max_total_media_bytes": 1024}, media={"src_audio": SOUND_URL})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")


def test_input_sound_arrives_at_the_rate_of_the_model() -> None:
    omni = SoundingOmni()
    assert post(omni, media={"src_audio": SOUND_URL}).status_code == 200
    (sound,) = omni.requests[0].media["src_audio"]
    assert isinstance(sound, ArrayData) and sound.sample_rate == 8000
    assert sound.shape == (2, pytest.approx(200, abs=2))


def test_other_words_for_the_same() -> None:
    omni = SoundingOmni()
    assert post(omni, prompt=..., input="wind", audio_length=2, seed=None).headers["x-seed"] == "7"
    assert (omni.requests[0].prompt, omni.requests[0].params.seconds) == ("wind", 2)
    assert error(post(input="wind"))["param"] == "input"  # and not both


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ...}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": "2"}, "seconds"),
        ({"seconds": 31}, "seconds"),
        ({"seconds": 1e9}, "seconds"),
        ({"response_format": "aac"}, "response_format"),
        ({"response_format": "xyz"}, "response_format"),
        ({"seed": 2**64}, "seed"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"n": 2}, "n"),
        ({"size": "64x64"}, "size"),
        ({"speed": 2}, "speed"),
        ({"extra_args": {"height": 64}}, "extra_args.height"),
        ({"extra_args": {"no_such": 64}}, "extra_args.no_such"),
        ({"media": {"image": SOUND_URL}}, "media.image"),
        ({"media": {"src_audio": [SOUND_URL] * 2}}, "media.src_audio"),
        ({"media": {"src_audio": "data:audio/wav;base64,AAAA"}}, "media.src_audio"),
        ({"media": {"src_audio": "file:///etc/passwd"}}, "media.src_audio"),
        ({"media": {"src_audio": 3}}, "media.src_audio"),
        ({"sigmas": [1.0]}, "sigmas"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    omni = SoundingOmni()
    assert error(post(omni, **body))["param"] == param
    assert omni.requests == []
    assert post(omni).status_code == 200


def test_a_model_of_another_kind_or_name() -> None:
    omni = FakeOmni()
    found = error(post(omni))
    assert found["param"] == "model" and "image, not sound" in found["message"] and omni.requests == []
    assert error(post(model="other"), 404)["param"] == "model"


def test_not_ready_failing_and_without_a_rate() -> None:
    omni = SoundingOmni()
    omni.status = "loading"
    assert error(post(omni), 503)["code"] == "not_ready"
    omni = SoundingOmni()
    omni.fails_with = GenerationError("it broke")
    assert error(post(omni), 500)["message"] == "it broke"
    omni = SoundingOmni()
    omni.sample_rate = None
    assert "samples per second" in error(post(omni), 500)["message"]

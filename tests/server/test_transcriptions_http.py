"""POST /v1/audio/transcriptions, for real: formats of answers and of files, what is refused, clients that leave."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server_process import MODEL, Server, error_of, serving, until

from polymux.media.audio import AudioFormat, encode_audio

URL = "/v1/audio/transcriptions"
RATE = 16000


def noise(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal((1, int(seconds * rate))) * 0.1).astype(np.float32)


def file(seconds: float = 5.3, format: AudioFormat = "wav", rate: int = RATE, seed: int = 0) -> bytes:
    return encode_audio(noise(seconds, rate, seed), rate, format)


@pytest.fixture(scope="module")
def writer(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "4", "--max-input-audio-seconds", "400")
    with serving(tiny_checkpoint("whisper"), tmp_path_factory.mktemp("writer"), *flags) as running:
        yield running


def ask(server: Server, data: bytes | None = None, **fields: Any) -> httpx.Response:
    given = {"model": MODEL, "temperature": 0, "language": "en"} | fields
    form = {name: value for name, value in given.items() if value is not None}
    return server.http.post(URL, data=form, files={"file": ("a.wav", file() if data is None else data)})


def test_formats_of_the_answer(writer: Server) -> None:
    plain = ask(writer)
    assert plain.status_code == 200, plain.text
    assert set(plain.json()) == {"text", "usage"} and plain.json()["usage"] == {"type": "duration", "seconds": 6}
    text = plain.json()["text"]
    verbose = ask(writer, response_format="verbose_json", **{"timestamp_granularities[]": "segment"}).json()
    assert (verbose["task"], verbose["language"], verbose["duration"], verbose["text"]) == (
        "transcribe",
        "en",
        5.3,
        text,
    )
    segments = verbose["segments"]
    assert "".join(segment["text"] for segment in segments).strip() == text
    assert all(0 <= s["start"] <= s["end"] <= 5.3 and s["tokens"] for s in segments)
    bare = ask(writer, response_format="text")
    assert bare.text == text + "\n" and bare.headers["content-type"].startswith("text/plain")
    srt, vtt = ask(writer, response_format="srt"), ask(writer, response_format="vtt")
    assert vtt.headers["content-type"].startswith("text/vtt") and vtt.text.startswith("WEBVTT\n\n")
    assert len(re.findall(r"^\d\d:\d\d:\d\d,\d{3} --> ", srt.text, re.M)) == len(segments)
    assert len(re.findall(r"^\d\d:\d\d:\d\d\.\d{3} --> ", vtt.text, re.M)) == len(segments)


def test_where_the_time_went(writer: Server) -> None:
    for format in ("json", "text"):
        profile = json.loads(ask(writer, file(), response_format=format, profile="true").headers["x-profile"])
        assert profile["components"] and profile["total"] >= profile["computing"] > 0
    assert "x-profile" not in ask(writer, file()).headers


@pytest.mark.parametrize("format", ["flac", "mp3", "opus"])
def test_formats_of_the_file(writer: Server, format: AudioFormat) -> None:
    assert ask(writer, file(1, format)).status_code == 200
    if format == "flac":  # the very samples
        assert ask(writer, file(1, format)).json() == ask(writer, file(1)).json()
        stereo = encode_audio(np.repeat(noise(1), 2, axis=0), RATE, format)
        assert ask(writer, stereo).json() == ask(writer, file(1)).json()


def test_other_rates_languages_and_seeds(writer: Server) -> None:
    assert ask(writer, file(1, rate=44100)).status_code == 200
    heard = ask(writer, language=None, response_format="verbose_json").json()
    assert heard["language"] in ("en", "de", "ja")
    drawn = [ask(writer, temperature=60, seed=seed).json()["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert ask(writer, prompt="the lazy dog").status_code == 200
    assert ask(writer, stream="false").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"), ({"language": "english"}, "language"), ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"), ({"response_format": "xyz"}, "response_format"),
        ({"stream": "true"}, "stream"),
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities.0"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"), ({"tone": 1}, "tone"),
        ({"prompt": "word " * 40}, "prompt"), ({"prompt": "<|en|>"}, "prompt"), ({"seed": -1}, "seed"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"), ({"file": "file:///etc/passwd"}, "file"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(writer: Server, fields: dict[str, Any], param: str) -> None:
    before = writer.outcomes()["refused"]
    answer = ask(writer, **fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text
    assert writer.outcomes()["refused"] == before + 1


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"\x89PNG\r\n\x1a\n", file(1)[:-1000], file(1, "flac")[:-900], file(401, rate=100)],
    ids=["empty", "head", "png", "cut", "cut flac", "long"],
)  # fmt: skip
def test_wrong_files_are_refused(writer: Server, data: bytes) -> None:
    answer = ask(writer, data)
    assert answer.status_code == 400 and error_of(answer)["param"] == "file", answer.text


def test_other_refusals(writer: Server) -> None:
    assert ask(writer, model="other").status_code == 404
    assert writer.http.post(URL, json={"model": MODEL}).status_code == 415
    none = writer.http.post(URL, files={"model": (None, MODEL)})
    assert none.status_code == 400 and error_of(none)["param"] == "file"
    remote = writer.http.post(URL, files={"file": (None, "http://127.0.0.1:1/a.wav")})
    assert remote.status_code == 400 and error_of(remote)["param"] == "file"
    for path, body in (
        ("/v1/audio/speech", {"input": "a"}), ("/v1/audio/generate", {"prompt": "a"}),
        ("/v1/images/generations", {"prompt": "a"}),
    ):  # fmt: skip
        refused = writer.http.post(path, json=body)
        assert refused.status_code == 400 and error_of(refused)["param"] == "model"
    (model,) = writer.http.get("/v1/models").json()["data"]
    assert model["capabilities"]["languages"] == ["de", "en", "ja"] and model["capabilities"]["modality"] == "text"


def test_in_company(writer: Server) -> None:
    alone = [ask(writer, file(seed=seed)).json() for seed in range(3)]
    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda i: ask(writer, file(seed=i % 3)).json(), range(9)))
    assert together == alone * 3


def test_a_client_that_leaves(writer: Server) -> None:
    before, form = writer.outcomes()["aborted"], {"model": MODEL}
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(writer.url + URL, data=form, files={"file": ("a.wav", file(390))}, timeout=1)
    until(lambda: writer.running() == writer.waiting() == 0)
    assert writer.outcomes()["aborted"] == before + 1
    assert ask(writer).status_code == 200


def test_openai_client(writer: Server) -> None:
    wanted = ask(writer, response_format="verbose_json").json()
    with openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0) as client:
        create = client.audio.transcriptions.create
        given: dict[str, Any] = {"model": MODEL, "language": "en", "temperature": 0}
        assert create(file=io.BytesIO(file()), **given).text == wanted["text"]
        verbose = create(file=("a.wav", file()), response_format="verbose_json", **given)
        assert verbose.duration == 5.3 and verbose.segments is not None
        assert [s.text for s in verbose.segments] == [s["text"] for s in wanted["segments"]]
        assert create(file=("a.wav", file()), response_format="srt", **given).startswith("1\n00:00:0")  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError) as error:
            create(file=("a.wav", b"no"), **given)
        assert error.value.param == "file"

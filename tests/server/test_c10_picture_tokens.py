"""A model that writes pictures token by token, and answers too: over HTTP, and on the command line."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from server_process import MODEL, START_S, Server, serving

from polymux.config import stage_environment
from polymux.testing.tiny.inputs import picture

PICTURES, CHAT = "/v1/images/generations", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a red cat", "seed": 4}


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_checkpoint("janus"), tmp_path_factory.mktemp("pictures"), "--max-num-seqs", "4") as running:
        yield running


def draw(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(PICTURES, json=BODY | fields)


def shown(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def chat(server: Server, **fields: Any) -> httpx.Response:
    file = io.BytesIO()
    picture(40, 32).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": 3, "temperature": 1.0}
    return server.http.post(CHAT, json=body | fields)


def test_pictures(server: Server) -> None:
    both = draw(server, n=2, size="8x8", guidance_scale=3.0, extra_args={"top_k": 20})
    assert both.status_code == 200, both.text
    data = both.json()["data"]
    assert [one["seed"] for one in data] == [4, 5] and data[0]["b64_json"] != data[1]["b64_json"]
    assert shown(data[0]["b64_json"]).size == (8, 8)
    second = draw(server, seed=5, guidance_scale=3.0, extra_args={"top_k": 20}, response_format="url").json()["data"][0]
    fetched = server.http.get(second["url"])
    assert fetched.status_code == 200 and fetched.content == base64.b64decode(data[1]["b64_json"])


def test_a_stream_has_progress_and_the_picture(server: Server) -> None:
    answer = draw(server, stream=True, stream_progress=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "image_generation.completed" and "image_generation.progress" in kinds
    assert events[-1]["b64_json"] == draw(server).json()["data"][0]["b64_json"]
    assert max(event.get("step", 0) for event in events) <= 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "64x64"}, "size"),
        ({"guidance_scale": 1.0}, "guidance_scale"),
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"num_inference_steps": 3}, "num_inference_steps"),
        ({"stream": True, "partial_images": 1}, "partial_images"),
        ({"extra_args": {"top_p": 2}}, "extra_args.top_p"),
        ({"extra_args": {"num_beams": 2}}, "extra_args.num_beams"),
        ({"extra_args": {"do_sample": False}, "n": 2}, "n"),
    ],
)
def test_refusals_name_the_client_s_field(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = draw(server, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_answers_and_the_model(server: Server) -> None:
    answer = chat(server)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["usage"]["completion_tokens"] == 8
    lines = [line[6:] for line in chat(server, stream=True).text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == text
    assert chat(server, modalities=["text", "audio"]).json()["error"]["param"] == "modalities"
    can = server.http.get("/v1/models").json()["data"][0]["capabilities"]
    assert (can["makes"], can["fixed_size"], can["chats"]) == (["image", "text"], True, False)
    assert can["answers"]["chats"] and can["answers"]["media"] == {"image": 16}
    speech = server.http.post("/v1/audio/speech", json={"input": "hello", "voice": "default"})
    assert speech.status_code == 400


def test_the_command(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polymux.cli", "generate", "--model", str(tiny_checkpoint("emu3"))]
    done = subprocess.run(
        [*command, "--prompt", "a red cat", "--seed", "4", "--size", "32x16", "-o", "x.png"],
        capture_output=True, text=True, cwd=tmp_path, env=stage_environment(), timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "x.png").size == (32, 16) and done.stderr.endswith("seed: 4\n")

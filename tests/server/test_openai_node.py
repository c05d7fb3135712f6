"""OpenAI's client for Node.js. Runs where it has been installed: `npm install` in tests/server/node."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from server_process import BASE, Server, pixels, until

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")
PICTURE = BASE | {"num_inference_steps": 4}

pytestmark = pytest.mark.skipif(
    NODE is None or not (FOLDER / "node_modules" / "openai").is_dir(), reason="needs Node.js and its package openai"
)


def run(server: Server, scenario: str) -> Any:
    words = [str(NODE), "client.mjs", server.url, scenario]
    done = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def decoded(image: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image))))


def test_generate(server: Server) -> None:
    answer = run(server, "generate")
    assert answer["seed"] == 1
    np.testing.assert_array_equal(decoded(answer["image"]), pixels(server.post(PICTURE)))


def test_stream(server: Server) -> None:
    *previews, last = run(server, "stream")
    assert [event["type"] for event in previews] == ["image_generation.partial_image"] * 2
    assert last["type"] == "image_generation.completed"
    np.testing.assert_array_equal(decoded(last["image"]), pixels(server.post(PICTURE)))


def test_chat(server: Server) -> None:
    assert run(server, "chat") == {"role": "assistant", "parts": ["image_url"]}


def test_errors(server: Server) -> None:
    assert run(server, "errors") == [
        {"name": "BadRequestError", "status": 400, "param": "size", "code": "invalid_value"},
        {"name": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"},
        {"name": "BadRequestError", "status": 400, "param": "quality", "code": "invalid_value"},
    ]


@pytest.mark.parametrize(
    ("scenario", "name"), [("timeout", "APIConnectionTimeoutError"), ("cancel", "APIUserAbortError")]
)
def test_who_leaves_ends_the_request(server: Server, scenario: str, name: str) -> None:
    before = server.outcomes()
    assert run(server, scenario)["name"] == name
    until(lambda: server.outcomes()["aborted"] == before["aborted"] + 1)

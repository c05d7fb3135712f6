"""Streams of pictures from a real server, as OpenAI's client reads them, and what becomes of one that is left."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from server_process import BASE, ENDLESS, IMAGES, Server, error_of, pixels, until

SIZE: Any = BASE["size"]
OURS = {"num_inference_steps": 8, "seed": 1}


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def picture(event: Any) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(event.b64_json)))).astype(int)


def test_previews_come_closer_and_leave_the_picture_alone(server: Server, api: openai.OpenAI) -> None:
    before = server.outcomes()
    plain = pixels(server.post(BASE | OURS))
    stream = api.images.generate(prompt=BASE["prompt"], size=SIZE, stream=True, partial_images=3, extra_body=OURS)
    *previews, final = list(stream)
    assert [e.type for e in previews] == ["image_generation.partial_image"] * 3
    assert [e.partial_image_index for e in previews] == [0, 1, 2]
    assert final.type == "image_generation.completed"
    assert (final.size, final.output_format, final.background) == (SIZE, "png", "opaque")
    assert final.seed == 1
    assert np.abs(picture(final) - plain).max() <= 1  # merged with others or not: they differ by rounding
    far, nearer, near = (np.abs(picture(e) - plain).mean() for e in previews)
    assert far > nearer > near
    assert server.outcomes()["completed"] == before["completed"] + 2


def test_several_pictures_share_a_stream(server: Server, api: openai.OpenAI) -> None:
    events = list(api.images.generate(prompt="a", n=2, size=SIZE, stream=True, partial_images=1, extra_body=OURS))
    done = {e.index: e for e in events if e.type == "image_generation.completed"}
    assert {i: e.seed for i, e in done.items()} == {0: 1, 1: 2}
    assert sorted(e.index for e in events if e.type == "image_generation.partial_image") == [0, 1]
    both = server.post(BASE | OURS | {"n": 2})
    assert all(np.abs(picture(e) - pixels(both, i)).max() <= 1 for i, e in done.items())


def test_progress_counts_up(server: Server) -> None:
    body = BASE | OURS | {"stream": True, "stream_progress": True}
    with server.http.stream("POST", IMAGES, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    progress = [e for e in data if e["type"] == "image_generation.progress"]
    assert data[-1]["type"] == "image_generation.completed" and len(data) == len(progress) + 1
    steps = [e["step"] for e in progress]
    assert steps == sorted(steps) and steps[-1] == 8
    assert {e["total_steps"] for e in progress} <= {None, 8}
    assert progress[-1]["phase"] == "decode"


def test_a_bad_stream_is_a_plain_400(server: Server, api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.images.generate(prompt="a", size=SIZE, stream=True, partial_images=4)
    assert error_of(refused.value.response)["param"] == "partial_images"


@pytest.mark.parametrize("previews", [0, 3])
def test_leaving_in_mid_stream_frees_the_engine(server: Server, previews: int) -> None:
    before = server.outcomes()
    body = ENDLESS | {"stream": True, "partial_images": previews, "stream_progress": True}
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("POST", IMAGES, json=body) as response:
        for line in response.iter_lines():
            if '"phase":"denoise","step":' in line and '"step":0' not in line:
                break
        assert server.running() == 1
    until(lambda: server.running() == 0)
    assert server.post(BASE, timeout=10).status_code == 200
    assert server.outcomes()["aborted"] == before["aborted"] + 1

"""Seeds, n, size and format do what they say, over HTTP and through OpenAI's own client."""

from __future__ import annotations

import base64
import io

import httpx
import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from server_process import BASE, MODEL, Server, pixels, until


def test_a_seed_gives_the_same_picture_again(server: Server) -> None:
    assert np.array_equal(pixels(server.post(BASE)), pixels(server.post(BASE)))


def test_another_seed_gives_another_picture(server: Server) -> None:
    assert not np.array_equal(pixels(server.post(BASE)), pixels(server.post(BASE | {"seed": 2})))


def test_n_pictures_are_those_of_n_seeds(server: Server) -> None:
    response = server.post(BASE | {"n": 2})
    assert [item["seed"] for item in response.json()["data"]] == [1, 2]
    first, second = pixels(response, 0), pixels(response, 1)
    assert np.array_equal(first, pixels(server.post(BASE)))
    assert np.abs(second - pixels(server.post(BASE | {"seed": 2}))).max() <= 1
    assert not np.array_equal(first, second)


def test_without_a_seed_one_is_drawn_and_told(server: Server) -> None:
    body = BASE | {"seed": None}
    one, two = server.post(body), server.post(body)
    assert not np.array_equal(pixels(one), pixels(two))
    again = server.post(BASE | {"seed": one.json()["seed"]})
    assert np.array_equal(pixels(again), pixels(one))


@pytest.mark.parametrize("size", ["96x64", "64x96", "32x32"])
def test_size(server: Server, size: str) -> None:
    response = server.post(BASE | {"size": size})
    height, width, _ = pixels(response).shape
    assert f"{width}x{height}" == response.json()["size"] == size


def test_formats_and_compression(server: Server) -> None:
    files = {}
    for format in ("png", "jpeg", "webp"):
        response = server.post(BASE | {"output_format": format})
        assert response.json()["output_format"] == format
        files[format] = base64.b64decode(response.json()["data"][0]["b64_json"])
        assert Image.open(io.BytesIO(files[format])).format == format.upper()
    assert files["jpeg"].startswith(b"\xff\xd8")
    for format in ("jpeg", "webp"):
        small, large = (
            base64.b64decode(
                server.post(BASE | {"output_format": format, "output_compression": q}).json()["data"][0]["b64_json"]
            )
            for q in (10, 100)
        )
        assert len(small) < len(large)


def test_steps_and_guidance_matter(server: Server) -> None:
    base = pixels(server.post(BASE))
    assert not np.array_equal(base, pixels(server.post(BASE | {"num_inference_steps": 3})))
    guided = BASE | {"true_cfg_scale": 4.0, "negative_prompt": "b"}
    assert not np.array_equal(base, pixels(server.post(guided)))
    assert not np.array_equal(pixels(server.post(guided)), pixels(server.post(guided | {"negative_prompt": "c d"})))


def test_openais_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "polymux"
        answer = client.images.generate(
            model=MODEL,
            prompt="a",
            n=2,
            size="96x64",  # type: ignore[arg-type]  # any size
            response_format="b64_json",
            output_format="jpeg",
            output_compression=80,
            quality="auto",
            user="somebody",
            extra_body={"num_inference_steps": 2, "seed": 5, "true_cfg_scale": 2.0, "negative_prompt": "b"},
        )
        assert answer.data is not None and len(answer.data) == 2
        assert (answer.size, answer.output_format) == ("96x64", "jpeg")
        assert Image.open(io.BytesIO(base64.b64decode(answer.data[1].b64_json or ""))).size == (96, 64)
        with pytest.raises(openai.BadRequestError) as bad:
            client.images.generate(model=MODEL, prompt="a", size="65x63")  # type: ignore[call-overload]
        assert (bad.value.param, bad.value.code, bad.value.type) == ("size", "invalid_value", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            client.images.generate(model="gpt-image-1", prompt="a")
        assert missing.value.code == "model_not_found"


def test_the_request_id_comes_back(server: Server) -> None:
    assert server.post(BASE, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(server.post(BASE | {"n": 0}).headers["x-request-id"]) > 8


def test_the_log_has_a_line_and_no_prompt(server: Server) -> None:
    secret = "a very private prompt"
    server.post(BASE | {"prompt": secret}, headers={"x-request-id": "logged-1"})
    server.post(BASE | {"prompt": [secret]}, headers={"x-request-id": "logged-2"})
    until(lambda: "logged-2" in server.log.read_text())  # written when the answer is out
    text = server.log.read_text()
    assert "logged-1 POST /v1/images/generations 200" in text
    assert "logged-2 POST /v1/images/generations 400" in text
    assert secret not in text


def test_metrics_are_prometheus_text(server: Server) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "# TYPE polymux:requests_total counter" in response.text


def test_keep_alive_serves_many_requests_on_one_connection(server: Server) -> None:
    def connections(status: str) -> int:
        return sum(c.status == status for c in psutil.Process(server.pid).net_connections(kind="tcp"))

    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        open_now = connections(psutil.CONN_ESTABLISHED)
        assert {client.get("/health").status_code for _ in range(20)} == {200}
        assert connections(psutil.CONN_ESTABLISHED) == open_now
    until(lambda: connections(psutil.CONN_CLOSE_WAIT) == 0)


def test_the_api_process_has_not_loaded_torch(server: Server) -> None:
    maps = {item.path for item in psutil.Process(server.pid).memory_maps()}
    assert not [path for path in maps if "torch" in path]
    (stage,) = server.stages()
    assert [item.path for item in stage.memory_maps() if "torch" in item.path]

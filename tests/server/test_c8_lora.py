"""Case C8: adapters over HTTP do what they say, and nothing of them stays."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from server_process import Server, serving

KEYS = ".to_q."


@pytest.fixture(scope="module")
def folder(tiny_lora: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter as it is, one with other layers, and one of which no layer and one of which half has a place."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("loras")
    state = load_file(tiny_lora("sd15"))
    save_file(state, folder / "a.safetensors")
    save_file({key: -value for key, value in state.items() if KEYS in key}, folder / "b.safetensors")
    save_file({"nowhere." + key: value for key, value in state.items()}, folder / "none.safetensors")
    save_file({key.replace("to_q", "to_w"): value for key, value in state.items()}, folder / "half.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(
    tiny_checkpoint: Callable[..., Path], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ("--allowed-lora-path", str(folder))
    with serving(str(tiny_checkpoint("sd15")), tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


def post(server: Server, lora: Any = None) -> httpx.Response:
    body = {"prompt": "a", "size": "64x64", "num_inference_steps": 2, "seed": 1, "lora": lora}
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=60)


def picture(server: Server, lora: Any = None) -> np.ndarray[Any, Any]:
    answer = post(server, lora)
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].partition(".")[0] == "lora"
    return str(error["message"])


def test_adapters(server: Server, folder: Path) -> None:
    plain = picture(server)
    a = {"path": "a.safetensors"}
    first = picture(server, a)
    assert not np.array_equal(first, plain)
    np.testing.assert_array_equal(picture(server, a | {"scale": 0}), plain)
    np.testing.assert_array_equal(picture(server), plain)
    assert not np.array_equal(picture(server, [{"path": str(folder / "b.safetensors")}]), first)
    np.testing.assert_array_equal(picture(server, a), first)
    assert "keys matched StableDiffusionPipeline" in refused(post(server, {"path": "none.safetensors"}))
    np.testing.assert_array_equal(picture(server), plain)
    picture(server, {"path": "half.safetensors"})
    assert "half.safetensors: " in server.log.read_text()
    assert "layers matched" in server.log.read_text()
    np.testing.assert_array_equal(picture(server), plain)


@pytest.mark.parametrize("path", ["/etc/passwd", "../a.safetensors", "missing.safetensors"])
def test_files_elsewhere(server: Server, path: str) -> None:
    assert "there is no such file" in refused(post(server, {"path": path}))


@pytest.mark.parametrize("lora", [{"path": "a.safetensors", "scale": 1000}, {"scale": 1}, {}, {"name": "x"}])
def test_wrong_values(server: Server, lora: Any) -> None:
    refused(post(server, lora))
    assert post(server, {"path": "a.safetensors", "weight": 1}).status_code == 400
    assert post(server, "a.safetensors").status_code == 400


def test_names(server: Server) -> None:
    def call(verb: str, **body: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body)

    def names() -> Any:
        return httpx.get(f"{server.url}/v1/models").json()["data"][0]["adapters"]

    assert call("load", lora_name="ink", lora_path="a.safetensors").status_code == 200
    assert call("load", lora_name="ink", lora_path="b.safetensors").status_code == 400
    assert call("load", lora_name="up", lora_path="../up").json()["error"]["param"] == "lora_path"
    assert names() == ["ink"]
    np.testing.assert_array_equal(picture(server, {"name": "ink"}), picture(server, {"path": "a.safetensors"}))
    assert call("unload", lora_name="ink").status_code == 200
    assert call("unload", lora_name="ink").status_code == 400
    assert names() == []
    assert "known are none" in refused(post(server, {"name": "ink"}))


def test_in_a_form(server: Server) -> None:
    """A model that takes no pictures says so; that the field of a form is understood is seen before."""
    form = {"prompt": "a", "lora": json.dumps({"path": "a.safetensors", "weight": 1})}
    answer = httpx.post(f"{server.url}/v1/images/edits", data=form, files={"image": b"x"})
    assert answer.status_code == 400
    assert "weight" in answer.json()["error"]["message"]

"""Edits: every shape of upload, every kind of picture, and OpenAI's own client, against a real server."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from server_process import MODEL, Server, error_of, pixels, serving, until

EDITS = "/v1/images/edits"
BASE = {"model": MODEL, "prompt": "a", "seed": "1", "num_inference_steps": "4"}
ENDLESS = BASE | {"num_inference_steps": "100000"}
FLAGS = ("--max-num-seqs", "1", "--max-queue", "0", "--max-inference-steps", "200000", "--image-url-ttl", "3")


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_checkpoint("sd15-img2img"), tmp_path_factory.mktemp("edits"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def picture(width: int = 100, height: int = 70) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    red, green = columns * 255 // width, rows * 255 // height
    return Image.fromarray(np.stack([red, green, 255 - red], axis=-1).astype(np.uint8))


def file_of(image: Image.Image, format: str = "PNG", **kwargs: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, format, **kwargs)
    return target.getvalue()


PNG = file_of(picture())


def form(server: Server, *files: tuple[str, bytes], **fields: str) -> httpx.Response:
    uploads = [(name, ("a.png", content, "image/png")) for name, content in files]
    return server.http.post(EDITS, data=BASE | fields, files=uploads)


def refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_an_upload(server: Server, name: str) -> None:
    answer = form(server, (name, PNG))
    assert pixels(answer).shape == (64, 96, 3)
    assert np.array_equal(pixels(answer), pixels(form(server, ("image", PNG))))


def test_the_picture_matters(server: Server) -> None:
    other = file_of(picture().transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert not np.array_equal(pixels(form(server, ("image", PNG))), pixels(form(server, ("image", other))))


def test_two_pictures_for_a_model_of_one(server: Server) -> None:
    refused(form(server, ("image[]", PNG), ("image[]", PNG)), "image")


def test_no_picture(server: Server) -> None:
    refused(server.http.post(EDITS, files=[(name, (None, text)) for name, text in BASE.items()]), "image")
    refused(server.http.post(EDITS, json={"prompt": "a"}), "image")
    refused(server.post({"prompt": "a"}), "image")


@pytest.mark.parametrize("content", [b"this is text, whatever its name", PNG[: len(PNG) * 8 // 10], b""])
def test_a_file_that_is_no_whole_picture(server: Server, content: bytes) -> None:
    refused(form(server, ("image", content)), "image")


def test_json(server: Server) -> None:
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    body = {"prompt": "a", "seed": 1, "num_inference_steps": 4}
    by_upload = pixels(form(server, ("image", PNG)))
    for shape in ({"images": [{"image_url": url}]}, {"image": url}):
        assert np.array_equal(pixels(server.http.post(EDITS, json=body | shape)), by_upload)


@pytest.mark.parametrize(("size", "stated"), [(None, "96x64"), ("auto", "96x64"), ("64x96", "64x96"), ("65x63", None)])
def test_size(server: Server, size: str | None, stated: str | None) -> None:
    answer = form(server, ("image", PNG), **({} if size is None else {"size": size}))
    if stated is None:
        refused(answer, "size")
        return
    height, width, _ = pixels(answer).shape
    assert answer.json()["size"] == answer.json()["data"][0]["size"] == f"{width}x{height}" == stated


def kinds() -> dict[str, bytes]:
    image = picture()
    alpha = image.convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(image.size))
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    return {
        "rgba": file_of(alpha),
        "grey and alpha": file_of(alpha.convert("LA")),
        "palette": file_of(image.convert("P", palette=Image.Palette.ADAPTIVE)),
        "palette with transparency": file_of(alpha.quantize(), transparency=0),
        "black and white": file_of(image.convert("1")),
        "16 bits": file_of(deep),
        "16 bits, tiff": file_of(deep, "TIFF"),
        "cmyk": file_of(image.convert("CMYK"), "JPEG"),
        "cmyk, tiff": file_of(image.convert("CMYK"), "TIFF"),
        "webp": file_of(alpha, "WEBP"),
        "gif": file_of(image, "GIF"),
        "bmp": file_of(image, "BMP"),
        "turned by exif": file_of(image, "JPEG", exif=exif),
    }


@pytest.mark.parametrize("kind", kinds())
def test_kinds_of_pictures(server: Server, kind: str) -> None:
    answer = form(server, ("image", kinds()[kind]))
    assert pixels(answer).shape[:2] == ((96, 64) if kind == "turned by exif" else (64, 96))


def test_fields_are_honoured_or_refused(server: Server) -> None:
    plain = pixels(form(server, ("image", PNG)))
    assert not np.array_equal(plain, pixels(form(server, ("image", PNG), strength="0.3")))
    assert not np.array_equal(plain, pixels(form(server, ("image", PNG), guidance_scale="1")))
    two = form(server, ("image", PNG), n="2")
    assert [item["seed"] for item in two.json()["data"]] == [1, 2]
    assert np.array_equal(plain, pixels(two))
    for field, text in [
        ("n", "2.0x"),
        ("strength", "2"),
        ("background", "transparent"),
        ("quality", "hd"),
        ("nope", "1"),
    ]:
        refused(form(server, ("image", PNG), **{field: text}), field)
    refused(form(server, ("image", PNG), ("mask", PNG)), "mask")
    refused(form(server, ("image", PNG), extra_args=json.dumps({"nope": 1})), "extra_args.nope")


def test_a_form_that_is_too_large_is_refused_as_it_arrives(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 2**20

    response = server.http.post(EDITS, content=endless(), headers={"content-type": "multipart/form-data; boundary=x"})
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"


def test_openais_client_edits(client: openai.OpenAI) -> None:
    extra = {"seed": 1, "num_inference_steps": 4, "strength": 0.5}
    for image in (io.BytesIO(PNG), ("a.png", PNG, "image/png"), [("a.png", PNG)]):
        answer = client.images.edit(
            image=image, prompt="a", model=MODEL, n=2, size="auto", output_format="jpeg", output_compression=80,
            background="opaque", extra_body=extra,
        )  # fmt: skip
        assert answer.data is not None and len(answer.data) == 2
        assert (answer.size, answer.output_format) == ("96x64", "jpeg")
        assert Image.open(io.BytesIO(base64.b64decode(answer.data[1].b64_json or ""))).size == (96, 64)
    with pytest.raises(openai.BadRequestError) as bad:
        client.images.edit(image=[("a.png", PNG), ("b.png", PNG)], prompt="a")
    assert bad.value.param == "image"


def test_openais_client_varies(client: openai.OpenAI) -> None:
    answer = client.images.create_variation(
        image=("a.png", PNG), n=2, model=MODEL, extra_body={"num_inference_steps": 4}
    )
    assert answer.data is not None and len({item.b64_json for item in answer.data}) == 2


def test_openais_client_gets_urls_that_work_and_end(server: Server, client: openai.OpenAI) -> None:
    answer = client.images.edit(image=("a.png", PNG), prompt="a", response_format="url", extra_body={"seed": 1})
    assert answer.data is not None and answer.data[0].b64_json is None
    url = answer.data[0].url or ""
    assert url.startswith(f"{server.url}/v1/files/images/")
    got = httpx.get(url)
    assert (got.status_code, got.headers["content-type"]) == (200, "image/png")
    assert Image.open(io.BytesIO(got.content)).size == (96, 64)
    until(lambda: httpx.head(url).status_code == 404)
    assert time.time() >= answer.model_dump()["expires_at"] - 1


def occupied(server: Server) -> threading.Thread:
    """Somebody else's request, which takes the only place until its client loses patience after a second."""

    def work() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + EDITS, data=ENDLESS, files=[("image", ("a.png", PNG))], timeout=1)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: server.running() == 1)
    return thread


def test_openais_client_waits_for_a_place_in_a_full_queue(server: Server, client: openai.OpenAI) -> None:
    def edit(retries: int) -> openai.types.ImagesResponse:
        body = {"num_inference_steps": 4}
        return client.with_options(max_retries=retries).images.edit(image=("a.png", PNG), prompt="a", extra_body=body)

    other = occupied(server)
    with pytest.raises(openai.RateLimitError) as full:
        edit(0)
    assert (full.value.code, full.value.response.headers["retry-after"].isdecimal()) == ("queue_full", True)
    answer = edit(8)
    assert answer.data is not None
    other.join()


def test_openais_client_tries_what_is_wrong_only_once(server: Server, client: openai.OpenAI) -> None:
    before = server.outcomes()["refused"]
    with pytest.raises(openai.BadRequestError):
        client.with_options(max_retries=3).images.edit(image=("a.png", b"no picture"), prompt="a")
    assert server.outcomes()["refused"] == before + 1


def test_openais_client_loses_patience(server: Server, client: openai.OpenAI) -> None:
    before = server.outcomes()["aborted"]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).images.edit(
            image=("a.png", PNG), prompt="a", extra_body={"num_inference_steps": 100_000}
        )
    until(lambda: server.outcomes()["aborted"] == before + 1 and server.running() == 0)
    assert pixels(form(server, ("image", PNG))).shape == (64, 96, 3)


def test_a_chat_edits_as_this_route_does_and_goes_on_with_the_answer(server: Server, client: openai.OpenAI) -> None:
    def ask(*messages: Any) -> tuple[str, Any]:
        answer = client.chat.completions.create(
            model=MODEL, messages=list(messages), seed=1, extra_body={"num_inference_steps": 4}
        )
        content: Any = answer.choices[0].message.content
        url: str = content[0]["image_url"]["url"]
        return url, np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))).astype(int)

    def edited(image: bytes) -> Any:
        return pixels(form(server, ("image", image)))

    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    first = {"role": "user", "content": parts}
    made, values = ask(first)
    assert np.array_equal(values, edited(PNG))
    answer = {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": made}}]}
    _, values = ask(first, answer, {"role": "user", "content": "a"})
    assert np.array_equal(values, edited(base64.b64decode(made.partition(",")[2])))

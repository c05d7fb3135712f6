"""POST /v1/images/generations, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_omni import CAPABILITIES, FakeOmni, client
from PIL import Image

from polymux.errors import (
    GenerationError,
    OutOfMemoryError,
    QueueFullError,
    StageDeadError,
)
from polymux.request import OmniDiffusionSamplingParams
from polymux.server.protocol import ImageGenerationRequest

URL = "/v1/images/generations"
BASE = {"prompt": "a", "size": "64x32", "num_inference_steps": 2, "seed": 1}


def post(body: Any = None, omni: FakeOmni | None = None, **kwargs: Any) -> httpx.Response:
    omni = omni or FakeOmni()
    sent = {"json": body} if isinstance(body, (dict, list)) else {"content": body} if body is not None else {}

    async def send() -> httpx.Response:
        async with client(omni) as http:
            return await http.post(URL, **sent, **kwargs)

    return asyncio.run(send())


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    for leak in ("Traceback", "File ", "/polymux", ".py", "pydantic"):
        assert leak not in error["message"]
    return error


def picture(response: httpx.Response, i: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(response.json()["data"][i]["b64_json"])))


def outcomes(omni: FakeOmni) -> dict[str, float]:
    samples = [s for m in omni.metrics.registry.collect() if m.name == "polymux:requests" for s in m.samples]
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total") and s.value}


def test_the_answer_has_openais_shape_and_says_what_it_is() -> None:
    answer = post(BASE).json()
    assert set(answer) == {"created", "data", "output_format", "size", "seed"}
    assert (answer["output_format"], answer["size"], answer["seed"]) == ("png", "64x32", 1)
    assert [set(item) for item in answer["data"]] == [{"b64_json", "seed", "size", "output_format"}]


def test_size_is_that_of_the_decoded_picture() -> None:
    answer = post({"prompt": "a", "size": "auto"})
    assert answer.json()["size"] == "32x16"
    assert picture(answer).size == (32, 16)


@pytest.mark.parametrize(("name", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8"), ("webp", b"RIFF")])
def test_output_format(name: str, magic: bytes) -> None:
    answer = post(BASE | {"output_format": name})
    assert answer.json()["output_format"] == name
    assert base64.b64decode(answer.json()["data"][0]["b64_json"]).startswith(magic)


@pytest.mark.parametrize("name", ["jpeg", "webp"])
def test_compression_makes_the_file_smaller(name: str) -> None:
    small, large = (
        len(post(BASE | {"output_format": name, "output_compression": quality}).content) for quality in (10, 100)
    )
    assert small < large


@pytest.mark.parametrize("extra", [{}, {"output_format": "png"}, {"output_format": None}])
def test_compression_of_a_png_is_refused(extra: dict[str, Any]) -> None:
    response = post(BASE | {"output_compression": 50} | extra)
    assert response.status_code == 400
    assert error_of(response)["param"] == "output_compression"


def test_n_pictures_with_a_seed_each() -> None:
    data = post(BASE | {"n": 3}).json()["data"]
    assert [item["seed"] for item in data] == [1, 2, 3]


def test_outputs_of_several_pictures_claim_no_seed_of_their_own() -> None:
    omni = FakeOmni()
    omni.images = 2
    answer = post(BASE, omni).json()
    assert [item["seed"] for item in answer["data"]] == [None, None]
    assert answer["seed"] == 1


# Each field of the sampling parameters, and how the body says it; None: pictures over HTTP have no use for it.
FIELDS: dict[str, tuple[dict[str, Any], Any] | None] = {
    "height": ({"size": "64x32"}, 32),
    "width": ({"size": "64x32"}, 64),
    "num_inference_steps": ({"num_inference_steps": 3}, 3),
    "guidance_scale": ({"guidance_scale": 2}, 2.0),
    "guidance_scale_2": ({"guidance_scale_2": 2.5}, 2.5),
    "true_cfg_scale": ({"true_cfg_scale": 4.5, "negative_prompt": ""}, 4.5),
    "seed": ({"seed": 2**64 - 1}, 2**64 - 1),
    "num_outputs_per_prompt": ({"n": 2}, 2),
    "negative_prompt": ({"negative_prompt": "b"}, "b"),
    "sigmas": ({"sigmas": [1, 0.5]}, (1.0, 0.5)),
    "timesteps": ({"timesteps": [999, 500]}, (999.0, 500.0)),
    "max_sequence_length": ({"max_sequence_length": 77}, 77),
    "extra_args": ({"extra_args": {"eta": 0.5, "x": [1, None, "s"]}}, {"eta": 0.5, "x": [1, None, "s"]}),
    "profile": ({"profile": True}, True),
    "num_frames": None,
    "enable_frame_interpolation": None,
    "frame_interpolation_exp": None,
    "frame_interpolation_scale": None,
    "fps": None,
    "seconds": None,
    "strength": None,
    "generator": None,
    "output_type": None,
}


SAMPLING = [f.name for f in dataclasses.fields(OmniDiffusionSamplingParams)]


@pytest.mark.parametrize("name", [name for name in SAMPLING if name != "lora"])  # files: tests/server/test_c8_lora.py
def test_every_sampling_field_reaches_the_model(name: str) -> None:
    case = FIELDS[name]
    if case is None:
        assert name not in ImageGenerationRequest.model_fields
        return
    fields, expected = case
    omni = FakeOmni()
    arguments = ("prompt", "x", "eta", *FIELDS)
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, arguments=arguments)
    response = post({"prompt": "a"} | fields, omni)
    assert response.status_code == 200, response.text
    request = omni.requests[0]
    found = request.negative_prompt if name == "negative_prompt" else getattr(request.params, name)
    assert found == expected


NULLABLE = [name for name, field in ImageGenerationRequest.model_fields.items() if not field.is_required()]


@pytest.mark.parametrize("name", NULLABLE)
def test_null_means_not_given(name: str) -> None:
    assert post({"prompt": "a", name: None}).status_code == 200


@pytest.mark.parametrize(
    "extra",
    [
        {"quality": "auto"}, {"quality": "standard"}, {"background": "auto"}, {"moderation": "auto"},
        {"stream": False}, {"user": "u-1"}, {"response_format": "b64_json"}, {"model": "fake/model"},
    ],
)  # fmt: skip
def test_values_that_ask_for_what_happens_anyway(extra: dict[str, Any]) -> None:
    assert post(BASE | extra).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", "100000x10000"), ("size", "0x64"), ("size", "-64x64"), ("size", "abc"), ("size", "64"), ("size", 64),
        ("size", "64x64\n"), ("size", "٦٤x64"), ("size", "64x"), ("size", "65x63"), ("size", "1x" + "9" * 400),
        ("num_inference_steps", 0), ("num_inference_steps", -1), ("num_inference_steps", "x"),
        ("num_inference_steps", 10**9), ("num_inference_steps", True), ("num_inference_steps", 2.0),
        ("n", 0), ("n", -1), ("n", 10**6), ("n", "1"),
        ("seed", "abc"), ("seed", 1.5), ("seed", 2**64), ("seed", -1),
        ("guidance_scale", "x"), ("guidance_scale", [1]), ("guidance_scale_2", 1.0),
        ("response_format", "banana"), ("response_format", "file"),
        ("output_format", "gif"), ("output_compression", 101), ("output_compression", -1),
        ("prompt", None), ("prompt", {}), ("prompt", ["a"]), ("prompt", 3),
        ("negative_prompt", 3), ("user", "x" * 257),
        ("quality", "hd"), ("quality", "high"), ("background", "transparent"), ("moderation", "low"), ("stream", "x"),
        ("style", "vivid"), ("partial_images", 1), ("partial_images", 4), ("stream_progress", True), ("num_steps", 3),
        ("image", "x"),
        ("sigmas", [1.0, "x"]), ("extra_args", []), ("extra_args", "x"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_a_400_that_names_the_field(field: str, value: Any) -> None:
    omni = FakeOmni()
    response = post(BASE | {field: value}, omni)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["type"]) == (field.partition(".")[0] if field != "sigmas" else "sigmas.1",
                                               "invalid_request_error")  # fmt: skip
    assert field in error["message"]
    assert len(error["message"]) < 600
    assert omni.requests == []
    assert outcomes(omni) == {"refused": 1}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["guidance_scale", "extra_args"])
def test_numbers_that_are_none(number: str, field: str) -> None:
    value = number if field == "guidance_scale" else f'{{"eta":{number}}}'
    response = post(f'{{"prompt":"a","{field}":{value}}}'.encode())
    assert response.status_code == 400
    assert str(error_of(response)["param"]).startswith(field)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":', b"", b"[]", b"null", b"3", b'"a"', b"\xff\xfe{}", b'{"prompt":"\xff"}', b'{"prompt":"a"} x',
        b'{"prompt":"\\ud800"}', b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", b"[" * 10_000 + b"]" * 10_000,
        b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"prompt":"a","extra_args":' + b'{"a":' * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_a_body_that_is_no_object(body: bytes) -> None:
    response = post(body)
    assert response.status_code == 400
    assert error_of(response)["param"] is None


def test_a_missing_prompt() -> None:
    response = post({"seed": 1})
    assert response.status_code == 400
    assert error_of(response) | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": "prompt", "code": "invalid_value"
    }  # fmt: skip


@pytest.mark.parametrize(("content_type", "status"), [
    ("application/json; charset=utf-8", 200), ("application/problem+json", 200), ("APPLICATION/JSON", 200),
    ("application/json; charset=UTF-8; x=y", 200), ('application/json; charset="utf-8"', 200),
    ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data; boundary=x", 415),
    ("application/json; charset=utf-16", 415), ("application/json; charset=latin-1", 415), ("", 415), ("json", 415),
])  # fmt: skip
def test_content_type(content_type: str, status: int) -> None:
    assert post(json.dumps(BASE).encode(), headers={"content-type": content_type}).status_code == status


def test_another_model_is_a_404() -> None:
    omni = FakeOmni()
    response = post(BASE | {"model": "other"}, omni)
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"
    assert error_of(response)["code"] == "model_not_found"
    assert outcomes(omni) == {"refused": 1}


def test_an_argument_that_the_pipeline_does_not_take() -> None:
    response = post(BASE | {"extra_args": {"nope": 1}})
    assert response.status_code == 400
    assert error_of(response)["param"] == "extra_args.nope"
    assert "eta" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("height", "use the field size"),
        ("width", "use the field size"),
        ("num_outputs_per_prompt", "use the field n"),
        ("seed", "use the field seed"),
        ("prompt", "use the field prompt"),
        ("output_type", "it cannot be chosen here"),
        ("generator", "it cannot be chosen here"),
        ("num_frames", "it cannot be chosen here"),
    ],
)
def test_an_argument_with_a_field_of_its_own(name: str, hint: str) -> None:
    error = error_of(post(BASE | {"extra_args": {name: 64}}))
    assert error["param"] == f"extra_args.{name}"
    assert error["message"] == f"extra_args.{name}=64: {hint}"


def test_a_model_that_makes_no_pictures() -> None:
    omni = FakeOmni()
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, modality="video")
    response = post(BASE, omni)
    assert response.status_code == 400
    assert "video" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("full"), 429, "queue_full"),
        (StageDeadError("gone"), 503, "stage_dead"),
        (GenerationError("no"), 500, "generation_failed"),
        (OutOfMemoryError("no"), 500, "out_of_memory"),
    ],
)
def test_errors_of_the_engine(error: Exception, status: int, code: str) -> None:
    omni = FakeOmni()
    omni.fails_with = error
    response = post(BASE, omni)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status == 429)
    assert (response.headers.get("x-should-retry") == "false") == (status == 500)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("FileNotFoundError: '/root/a b/c.py': no", "FileNotFoundError: '...': no"),
        ("in ~/x/y.py (line 3), and/or 1/2", "in ... (line 3), and/or 1/2"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_what_a_library_said_shows_no_path(message: str, said: str) -> None:
    omni = FakeOmni()
    omni.fails_with = GenerationError(message)
    assert post(BASE, omni).json()["error"]["message"] == said


def test_the_name_of_the_model_is_not_told_to_strangers() -> None:
    response = post(BASE | {"model": "other"}, FakeOmni(model="/data/secret/model"))
    assert "secret" not in response.text


def test_loading_is_a_503() -> None:
    omni = FakeOmni()
    omni.status = "loading"
    response = post(BASE, omni)
    assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")


def test_an_exception_that_nobody_expected_says_nothing() -> None:
    omni = FakeOmni()
    omni.fails_with = ZeroDivisionError("secret of /root/x.py")
    response = post(BASE, omni)
    assert response.status_code == 500
    assert error_of(response)["message"] == "internal error"
    assert "x-request-id" in response.headers


def test_two_requests_with_one_client_id_are_two_for_the_engine() -> None:
    omni = FakeOmni()

    async def both() -> list[httpx.Response]:
        async with client(omni) as http:
            return await asyncio.gather(
                *(http.post(URL, json=BASE, headers={"x-request-id": "same"}) for _ in range(2))
            )

    assert [r.status_code for r in asyncio.run(both())] == [200, 200]
    first, second = (request.request_id for request in omni.requests)
    assert first != second
    assert first.startswith("same-")

"""Any JSON value in any field of a request for pictures: 200 and honoured, or an error that names a field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_omni import FakeOmni, client
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.server.protocol import ImageGenerationRequest

Send = Callable[[bytes], tuple[int, Any]]
URL = "/v1/images/generations"
OMNI = FakeOmni(max_generated_image_size=4096, max_num_outputs=3)
DIRECT = {"num_inference_steps", "guidance_scale", "seed", "negative_prompt"}  # the model gets these as they are

texts = st.text(max_size=20) | st.sampled_from(["64x64", "auto", "png", "b64_json", "url", "transparent", "fake/model"])
numbers = st.integers() | st.floats() | st.integers(-3, 3) | st.sampled_from([2**63, 2**64 - 1, 2**64, 10**400, 1e308])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def send() -> Iterator[Send]:
    """Sends a body and gives status and answer. One application for all: to build it takes longer than to use it."""
    with asyncio.Runner() as runner:
        http = client(OMNI)

        def post(body: bytes) -> tuple[int, Any]:
            OMNI.requests.clear()
            headers = {"content-type": "application/json"}
            response = runner.run(http.post(URL, content=body, headers=headers))
            is_stream = response.headers["content-type"].startswith("text/event-stream")
            return response.status_code, response.text if is_stream else response.json()

        yield post
        runner.run(http.aclose())


@pytest.mark.parametrize("name", sorted(ImageGenerationRequest.model_fields))
@given(value=json_values)
@settings(max_examples=25)
def test_any_value_in_a_field(send: Send, name: str, value: Any) -> None:
    status, answer = send(json.dumps({"prompt": "a", name: value}).encode())
    if status == 200:
        (request,) = OMNI.requests
        if name in DIRECT and value is not None:
            found = request.negative_prompt if name == "negative_prompt" else getattr(request.params, name)
            assert found == value
            assert isinstance(value, (str, int, float)) and not isinstance(value, bool)
        return
    assert status in (400, 404), answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is not None
    assert error["param"].partition(".")[0] in {name, "size", "prompt"} or name == "extra_args"
    assert OMNI.requests == []
    assert len(error["message"]) < 2000


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\ 01eE.-+aprompt', max_size=60).map(str.encode))
@settings(max_examples=150)
def test_any_bytes_as_a_body(send: Send, body: bytes) -> None:
    status, answer = send(body)
    assert status == 400, answer

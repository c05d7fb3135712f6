"""The chat route as OpenAI's own client sees it, on a real server."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from server_process import BASE, MODEL, Server, pixels, until

SAMPLING = {"size": "64x64", "num_inference_steps": 2, "seed": 1}
MESSAGES: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def decoded(part: Any) -> np.ndarray[Any, Any]:
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(int)


def test_the_picture_is_that_of_the_other_route(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, extra_body=SAMPLING)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    content: Any = answer.choices[0].message.content
    assert np.array_equal(decoded(content[0]), pixels(server.post(BASE)))
    assert content[0]["size"] == "64x64"
    again: list[Any] = [*MESSAGES, {"role": "assistant", "content": content}, *MESSAGES]
    assert client.chat.completions.create(model=MODEL, messages=again, extra_body=SAMPLING).choices


def test_a_stream_gives_the_same_picture(server: Server, client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options=options, extra_body=SAMPLING
        )
    )
    deltas: list[Any] = [choice.delta for chunk in chunks for choice in chunk.choices]
    (part,) = [part for delta in deltas for part in getattr(delta, "images", None) or []]
    assert np.array_equal(decoded(part), pixels(server.post(BASE)))
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].choices == []


def test_the_clients_own_helper_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=SAMPLING) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    assert decoded(message.images[0]).shape == (64, 64, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_errors(client: openai.OpenAI, stream: bool) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "stream": stream} | fields)

    with pytest.raises(openai.BadRequestError) as bad:
        ask(modalities=["text"])
    assert bad.value.param == "modalities"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(extra_body={"size": "65x63"})
    assert bad.value.param == "size"
    with pytest.raises(openai.NotFoundError):
        ask(model="other")


def test_a_client_that_leaves_a_stream_cancels(server: Server, client: openai.OpenAI) -> None:
    aborted = server.outcomes()["aborted"]
    body = SAMPLING | {"num_inference_steps": 100_000}
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=body)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stream.close()
    until(lambda: server.outcomes()["aborted"] == aborted + 1)
    until(lambda: server.running() == 0)

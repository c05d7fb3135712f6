"""Pictures as a stream of events."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from typing import Any, cast, get_args

import httpx
import msgspec
import openai
import pytest
from fake_omni import CAPABILITIES, FakeOmni, client
from openai.types import (
    image_edit_completed_event,
    image_edit_partial_image_event,
    image_gen_completed_event,
    image_gen_partial_image_event,
)
from PIL import Image

from polymux.errors import GenerationError, InvalidRequestError
from polymux.server.image_stream import CompletedEvent, PartialEvent

URL = "/v1/images/generations"
BASE = {"prompt": "a", "seed": 5, "size": "64x32", "stream": True}
EDITS = msgspec.structs.replace(CAPABILITIES, media={"image": 1}, required=("prompt", "image"), previews=True)


def omni_with_previews(**engine_args: Any) -> FakeOmni:
    omni = FakeOmni(**engine_args)
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, previews=True)
    return omni


def post(body: dict[str, Any], omni: FakeOmni, url: str = URL) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni) as http:
            return await http.post(url, json=body)

    return asyncio.run(send())


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events, whose names must be their types."""
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def picture(event: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(event["b64_json"])))


def png() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (64, 32)).save(data, "png")
    return data.getvalue()


def test_without_previews_there_is_one_event_per_picture() -> None:
    (event,) = events_of(post(BASE, FakeOmni()))
    assert picture(event).size == (64, 32)
    assert {k: v for k, v in event.items() if k not in ("b64_json", "created_at")} == {
        "type": "image_generation.completed",
        "size": "64x32",
        "output_format": "png",
        "background": "opaque",
        "quality": "auto",
        "index": 0,
        "seed": 5,
        "usage": None,
    }


def test_previews_come_first_and_are_counted_for_each_picture() -> None:
    omni = omni_with_previews()
    events = events_of(post(BASE | {"n": 2, "partial_images": 2, "output_format": "jpeg"}, omni))
    assert omni.requests[0].partial_images == 2
    assert [(e["type"].partition(".")[2], e["index"], e.get("partial_image_index")) for e in events] == [
        ("partial_image", 0, 0),
        ("partial_image", 1, 0),
        ("partial_image", 0, 1),
        ("partial_image", 1, 1),
        ("completed", 0, None),
        ("completed", 1, None),
    ]
    assert [e["seed"] for e in events[-2:]] == [5, 6]
    assert all(picture(e).format == "JPEG" and e["output_format"] == "jpeg" for e in events)


def test_progress_is_told_to_those_who_ask() -> None:
    first, *_ = events_of(post(BASE | {"stream_progress": True}, FakeOmni()))
    assert first == {"type": "image_generation.progress", "phase": "denoise", "step": 1, "total_steps": 2}


def test_edits_have_names_of_their_own() -> None:
    omni = omni_with_previews()
    omni.capabilities = EDITS
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    body = BASE | {"images": [{"image_url": url}], "partial_images": 1, "stream_progress": True}
    events = events_of(post(body, omni, "/v1/images/edits"))
    assert [e["type"] for e in events] == ["image_edit.progress", "image_edit.partial_image", "image_edit.completed"]


def test_layers_are_counted_through() -> None:
    omni = FakeOmni()
    omni.images = 3
    events = events_of(post(BASE, omni))
    assert [(e["index"], e["seed"]) for e in events] == [(0, None), (1, None), (2, None)]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"partial_images": 1}, "partial_images", "must be 0"),  # this model makes none
        ({"partial_images": 4}, "partial_images", "less than or equal to 3"),
        ({"partial_images": -1}, "partial_images", "greater than or equal to 0"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"stream": False, "partial_images": 1}, "partial_images", '"stream": true'),
        ({"stream": None, "stream_progress": True}, "stream_progress", '"stream": true'),
        ({"size": "65x32"}, "size", "multiple"),
    ],
)
def test_what_is_wrong_before_the_first_event_is_an_ordinary_error(change: Any, field: str, words: str) -> None:
    omni = FakeOmni()
    response = post(BASE | change, omni)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert words in error["message"]
    assert omni.requests == []


@pytest.mark.parametrize("stream", [None, False])
def test_choices_that_change_nothing_are_fine_without_a_stream(stream: bool | None) -> None:
    response = post(BASE | {"stream": stream, "partial_images": 0, "stream_progress": False}, FakeOmni())
    assert response.json()["data"][0]["seed"] == 5


def test_a_failure_is_the_last_event() -> None:
    omni = omni_with_previews()
    omni.fails_with = GenerationError("the model failed: RuntimeError: boom")
    partial, error = events_of(post(BASE | {"partial_images": 1}, omni))
    assert partial["type"] == "image_generation.partial_image"
    assert error["type"] == "error" and error["error"]["code"] == "generation_failed"


def test_what_the_pipeline_refuses_late_is_told_in_the_clients_words() -> None:
    omni = FakeOmni()
    omni.fails_with = InvalidRequestError("height=32: this pipeline likes it not", param="height")
    (error,) = events_of(post(BASE, omni))
    assert error["error"]["param"] == "size" and "size='64x32'" in error["error"]["message"]


def test_leaving_aborts() -> None:
    async def leave() -> FakeOmni:
        omni = omni_with_previews()
        omni.hold.clear()
        async with client(omni) as http:
            task = asyncio.create_task(http.post(URL, json=BASE))
            await omni.started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return omni

    omni = asyncio.run(leave())
    assert omni.aborted == [omni.requests[0].request_id]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PartialEvent, image_gen_partial_image_event.ImageGenPartialImageEvent),
        (PartialEvent, image_edit_partial_image_event.ImageEditPartialImageEvent),
        (CompletedEvent, image_gen_completed_event.ImageGenCompletedEvent),
        (CompletedEvent, image_edit_completed_event.ImageEditCompletedEvent),
    ],
)
def test_the_events_have_what_openai_says_they_have(ours: Any, theirs: Any) -> None:
    required = {name for name, field in theirs.model_fields.items() if field.is_required()}
    assert required <= set(ours.model_fields)
    assert set(get_args(theirs.model_fields["type"].annotation)) <= set(get_args(ours.model_fields["type"].annotation))


def through_openais_client(omni: FakeOmni, ask: Callable[[openai.AsyncOpenAI], Any]) -> list[Any]:
    async def read() -> list[Any]:
        async with client(omni) as http:
            api = openai.AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=http, max_retries=0)
            return [event async for event in await ask(api)]

    return asyncio.run(read())


def test_openais_client_reads_the_stream() -> None:
    size = cast(Any, "64x32")
    *partial, completed = through_openais_client(
        omni_with_previews(), lambda api: api.images.generate(prompt="a", size=size, stream=True, partial_images=2)
    )
    assert [type(e) for e in partial] == [image_gen_partial_image_event.ImageGenPartialImageEvent] * 2
    assert isinstance(completed, image_gen_completed_event.ImageGenCompletedEvent)
    assert completed.usage is None
    assert completed.size == "64x32"


def test_openais_client_edits_in_a_stream() -> None:
    """As a form, where everything is text."""
    omni = omni_with_previews()
    omni.capabilities = EDITS
    *partial, completed = through_openais_client(
        omni,
        lambda api: api.images.edit(
            image=("a.png", png()), prompt="a", stream=True, partial_images=1, extra_body={"stream_progress": False}
        ),
    )
    assert [type(e) for e in partial] == [image_edit_partial_image_event.ImageEditPartialImageEvent]
    assert isinstance(completed, image_edit_completed_event.ImageEditCompletedEvent)
    assert completed.size == "64x32"


def test_openais_client_raises_what_fails_late() -> None:
    omni = omni_with_previews()
    omni.fails_with = GenerationError("the model failed")
    with pytest.raises(openai.APIError, match="the model failed") as failed:
        through_openais_client(omni, lambda api: api.images.generate(prompt="a", stream=True, partial_images=1))
    assert failed.value.code == "generation_failed"

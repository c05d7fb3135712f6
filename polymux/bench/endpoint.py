"""What a request to an endpoint looks like, and what its answer has to be. One class per endpoint; here, pictures.

An answer counts if it holds what was asked for: pictures are opened, not only received.
"""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx2
import msgspec
from PIL import Image, UnidentifiedImageError

from polymux.bench.dataset import Item
from polymux.bench.settings import RequestSettings
from polymux.metrics.playback import Playback

MAX_EVENT = 2**28  # bytes

Event = TypeVar("Event", bound=msgspec.Struct)


class BadAnswer(Exception):
    """The server said that all is well, and sent something else. `kind` for the statistics."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """What came: outputs, their pixels as far as they are known, tokens of text, seconds of sound. Of a stream also
    when (`time.perf_counter`): the first moment at which there was something to see, each piece of text, and how its
    sound would have been heard."""

    outputs: int
    pixels: int = 0
    first: float | None = None
    tokens: int = 0
    times: tuple[float, ...] = ()
    sound: float = 0.0
    playback: Playback | None = None


class Endpoint(Protocol):
    def body(self, item: Item, index: int) -> dict[str, Any]:
        """The JSON of request `index`."""
        ...

    async def read(self, response: httpx2.Response) -> Answer:
        """All of an answer with status 200. Raises BadAnswer, and what httpx2 raises."""
        ...


class _Picture(msgspec.Struct):
    b64_json: str | None = None
    url: str | None = None


class _Pictures(msgspec.Struct):
    data: list[_Picture]


class _Event(msgspec.Struct):
    type: str = ""
    b64_json: str | None = None
    url: str | None = None
    error: Any = None


class Images:
    """POST /v1/images/generations, of any server in OpenAI's form. Pictures behind URLs are counted, not fetched."""

    def __init__(self, settings: RequestSettings, model: str | None) -> None:
        self._settings, self._model = settings, model

    def body(self, item: Item, index: int) -> dict[str, Any]:
        settings = self._settings
        seed = None if settings.seed is None else settings.seed + index
        given = {
            "model": self._model,
            "size": settings.size,
            "n": settings.num_images,
            "num_inference_steps": settings.steps,
            "seed": seed,
            "stream": settings.stream or None,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        return {"prompt": item.prompt} | fields | settings.extra_body | item.fields

    async def read(self, response: httpx2.Response) -> Answer:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await self._stream(response)
        try:
            pictures = msgspec.json.decode(await response.aread(), type=_Pictures).data
        except msgspec.DecodeError as error:
            raise BadAnswer("invalid_answer", str(error)) from None
        return _counted([(picture.b64_json, picture.url) for picture in pictures], None)

    async def _stream(self, response: httpx2.Response) -> Answer:
        first, pictures = None, list[tuple[str | None, str | None]]()
        async for event in events(response, _Event):
            if event.error is not None or event.type == "error":
                raise BadAnswer("stream_error", str(event.error)[:200])
            if first is None and (event.b64_json or event.url):
                first = time.perf_counter()
            if event.type.endswith(".completed"):
                pictures.append((event.b64_json, event.url))
        return _counted(pictures, first)


async def events(response: httpx2.Response, kind: type[Event]) -> AsyncIterator[Event]:
    """The events of a stream. Raises BadAnswer."""
    async for event in httpx2.EventSource(response, max_event_size=MAX_EVENT):
        if event.data and event.data != "[DONE]":
            try:
                yield msgspec.json.decode(event.data, type=kind)
            except msgspec.DecodeError as error:
                raise BadAnswer("invalid_answer", str(error)) from None


def _counted(pictures: list[tuple[str | None, str | None]], first: float | None) -> Answer:
    if not pictures:
        raise BadAnswer("no_picture", "the answer holds no picture")
    return Answer(len(pictures), sum(_pixels(data, url) for data, url in pictures), first)


def _pixels(data: str | None, url: str | None) -> int:
    """0 where there is only a URL."""
    if data is None:
        if not url:
            raise BadAnswer("no_picture", "a picture has neither b64_json nor url")
        return 0
    try:
        width, height = Image.open(io.BytesIO(base64.b64decode(data, validate=True))).size
    except (binascii.Error, UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise BadAnswer("broken_picture", str(error)) from None
    return width * height

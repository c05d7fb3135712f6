"""Pictures as a stream of events: progress and previews on the way, then every picture as soon as all are done.

The events are OpenAI's. Ours beyond those: `index` says which picture an event is about, where there are several; a
finished one has its `seed`; and progress is told if the client asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, TypedDict

from fastapi import Request
from pydantic import Field

from polymux.errors import InvalidRequestError
from polymux.media.image import ImageFormat
from polymux.omni_output import OmniPreview, OmniRequestOutput
from polymux.request import Progress
from polymux.server.generation import events
from polymux.server.image_answer import Background, Encoding, Picture, encoded, picture_of
from polymux.server.image_request import ImageJob, Streaming, StreamKind
from polymux.server.sse import StreamEvent
from polymux.server.state import ServerState

ProgressName = Literal["image_generation.progress", "image_edit.progress"]
PartialName = Literal["image_generation.partial_image", "image_edit.partial_image"]
CompletedName = Literal["image_generation.completed", "image_edit.completed"]


@dataclass(frozen=True)
class Names:
    """What the events of one kind of stream are called."""

    progress: ProgressName
    partial: PartialName
    completed: CompletedName


NAMES: dict[StreamKind, Names] = {
    "image_generation": Names(
        "image_generation.progress", "image_generation.partial_image", "image_generation.completed"
    ),
    "image_edit": Names("image_edit.progress", "image_edit.partial_image", "image_edit.completed"),
}


class ProgressEvent(StreamEvent):
    """How far the request is."""

    type: ProgressName
    phase: Literal["queued", "encode", "denoise", "decode"]
    step: int = Field(description="steps done, of all pictures")
    total_steps: int | None = Field(description="null: not known yet")


class PictureEvent(StreamEvent):
    """A picture, as it is or as the model expects it to become."""

    b64_json: str
    created_at: int = Field(description="seconds since 1970")
    size: str = Field(description="WIDTHxHEIGHT, as decoded")
    output_format: ImageFormat
    background: Background
    quality: Literal["auto"] = "auto"
    index: int = Field(description="which of the request's pictures")


class PartialEvent(PictureEvent):
    """A preview."""

    type: PartialName
    partial_image_index: int = Field(description="which of the picture's previews")


class CompletedEvent(PictureEvent):
    """A finished picture."""

    type: CompletedName
    seed: int | None = Field(description="gives this picture again, with n = 1; null: no single seed made it")
    usage: None = Field(default=None, description="tokens; the models here have none that could be counted")


async def image_events(
    state: ServerState, request: Request, job: ImageJob, streaming: Streaming
) -> AsyncGenerator[StreamEvent | None]:
    """What goes out for `job`; None where something has happened that the client does not want to hear of."""
    written = Writer(job.encoding, streaming.kind)
    source = events(state.omni, request, job.prompt, job.params, streaming.partial_images)
    try:
        async with contextlib.aclosing(source) as happenings:
            async for event in happenings:
                match event:
                    case Progress():
                        yield written.progress(event) if streaming.progress else None
                    case OmniPreview():
                        for partial in await asyncio.to_thread(written.partial, event):
                            yield partial
                    case OmniRequestOutput():
                        for completed in await asyncio.to_thread(written.completed, event):
                            yield completed
    except InvalidRequestError as error:
        raise job.words.of(error) from None


class Writer:
    """The events of one request. What encodes pictures is for a thread."""

    def __init__(self, encoding: Encoding, kind: StreamKind) -> None:
        self._encoding = encoding
        self._names = NAMES[kind]
        self._previews: Counter[int] = Counter()

    def progress(self, progress: Progress) -> ProgressEvent:
        return ProgressEvent(
            type=self._names.progress,
            phase=progress.phase,
            step=progress.step,
            total_steps=progress.total or None,
        )

    def partial(self, preview: OmniPreview) -> list[PartialEvent]:
        """One event, or of a layered picture one per layer: they are counted through, as in the output."""
        number = self._previews[preview.index]
        self._previews[preview.index] += 1
        first = preview.index * len(preview.images)
        return [
            PartialEvent(
                type=self._names.partial,
                partial_image_index=number,
                **shown(picture_of(image, self._encoding), first + i),
            )
            for i, image in enumerate(preview.images)
        ]

    def completed(self, output: OmniRequestOutput) -> list[CompletedEvent]:
        return [
            CompletedEvent(type=self._names.completed, seed=picture.seed, **shown(picture, index))
            for index, picture in enumerate(encoded(output, self._encoding))
        ]


class Shown(TypedDict):
    """What the events about a picture have in common."""

    b64_json: str
    created_at: int
    size: str
    output_format: ImageFormat
    background: Background
    index: int


def shown(picture: Picture, index: int) -> Shown:
    return {
        "b64_json": picture.base64(),
        "created_at": int(time.time()),
        "size": picture.size,
        "output_format": picture.format,
        "background": picture.background,
        "index": index,
    }

"""From the output of a generation to a chat completion, whole or in chunks.

Each output is a choice: pictures in `message.content`, as parts that a later message may hold again; in a stream, in
`delta.images`. Encoding and base64 take their time and run in threads. Knows no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

from polymux.errors import GenerationError, InvalidRequestError
from polymux.omni_output import OmniRequestOutput
from polymux.server.chat_protocol import (
    Answer,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChunkChoice,
    Delta,
    PicturePart,
    PictureUrl,
    Usage,
)
from polymux.server.image_answer import Encoding, Picture, encoded
from polymux.server.image_request import Words


class ChatAnswer:
    """The answer to one request: all its chunks share an id and a time."""

    def __init__(self, model: str, encoding: Encoding) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._model = model
        self._encoding = encoding
        self._created = int(time.time())

    def complete(self, output: OmniRequestOutput) -> bytes:
        """The answer's bytes. For a thread."""
        choices = [Choice(index=i, message=Answer(content=parts)) for i, parts in enumerate(self._choices(output))]
        answer = ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices)
        return answer.model_dump_json().encode()

    async def chunks(
        self, events: AsyncGenerator[object], words: Words, include_usage: bool
    ) -> AsyncGenerator[ChatChunk]:
        """A first chunk once the model has taken the request, then picture after picture. Closes `events`.

        Raises what `events` raises, in the client's words.
        """
        output: OmniRequestOutput | None = None
        begun = False
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    if not begun:
                        begun = True
                        yield self._chunk(0, Delta(role="assistant", content=""))
                    if isinstance(event, OmniRequestOutput):
                        output = event
            except InvalidRequestError as error:
                raise words.of(error) from None
        if output is None:
            raise GenerationError("the generation ended without an output")
        choices = await asyncio.to_thread(self._choices, output)
        for index, parts in enumerate(choices):
            if index > 0:
                yield self._chunk(index, Delta(role="assistant", content=""))
            for part in parts:
                yield self._chunk(index, Delta(images=[part]))
            yield self._chunk(index, Delta(), finished=True)
        if include_usage:
            yield ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=Usage())

    def _chunk(self, index: int, delta: Delta, finished: bool = False) -> ChatChunk:
        choice = ChunkChoice(index=index, delta=delta, finish_reason="stop" if finished else None)
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice])

    def _choices(self, output: OmniRequestOutput) -> list[list[PicturePart]]:
        """The pictures of each output. Layered models make several."""
        pictures = encoded(output, self._encoding)
        each = len(pictures) // len(output.seeds)
        return [
            [_part(k, picture) for k, picture in enumerate(pictures[start : start + each])]
            for start in range(0, len(pictures), each)
        ]


def _part(index: int, picture: Picture) -> PicturePart:
    return PicturePart(
        index=index,
        image_url=PictureUrl(url=f"data:image/{picture.format};base64,{picture.base64()}"),
        size=picture.size,
        output_format=picture.format,
        seed=picture.seed,
    )

"""From what a model writes and speaks to a chat completion, whole or in chunks. Knows no requests.

Speech is a file that grows: its bytes are in `audio.data`, in base64, after the text that they say. Encoding takes its
time and runs in threads.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncGenerator

import numpy as np

from polymux.errors import GenerationError, InvalidRequestError
from polymux.media.audio import AudioFormat, encode_audio
from polymux.media.sound_stream import SoundStream
from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput, samples_of
from polymux.request import SoundPiece, TextPiece
from polymux.server.chat_text_protocol import (
    CompletionDetails,
    Spoken,
    SpokenDelta,
    SpokenFormat,
    TextAnswer,
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextDelta,
    TextUsage,
)
from polymux.server.chat_text_request import TextWords
from polymux.server.profile_answer import RequestProfile
from polymux.server.tool_protocol import Call, CallDelta, CalledFunction, Reason
from polymux.server.transcripts import Transcripts
from polymux.tool_reader import CallReader
from polymux.tools import ToolCall


class TextChatAnswer:
    """The answer to one request: all its chunks share an id and a time.

    `spoken`: how, None if it is not. `reader`: finds the calls of tools in it, None if there are no tools to call.
    """

    def __init__(
        self, model: str, spoken: SpokenFormat | None, transcripts: Transcripts, reader: CallReader | None = None
    ) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._format: AudioFormat | None = "pcm" if spoken == "pcm16" else spoken
        self._transcripts = transcripts
        self._reader = reader
        self._audio_id = transcripts.new_id()

    async def complete(self, output: OmniRequestOutput) -> bytes:
        """The answer's bytes."""
        (text,) = output.text
        pieces = [text] if self._reader is None else [*self._reader.feed(text), *self._reader.end()]
        calls = [_call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        message = TextAnswer(content=None if calls and not said else said, tool_calls=calls or None)
        if self._format is not None:
            data = await asyncio.to_thread(_file, output, self._format)
            expires = self._transcripts.keep(self._audio_id, text)
            message.audio = Spoken(id=self._audio_id, data=data, expires_at=expires, transcript=text)
        answer = TextCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[TextChoice(message=message, finish_reason=self._reason(output))],
            usage=usage_of(output),
            seed=output.seeds[0],
        )
        if output.profile is not None:
            answer.profile = RequestProfile.of(output.profile)
        unasked = {"profile"} if output.profile is None else None
        return await asyncio.to_thread(lambda: answer.model_dump_json(exclude=unasked).encode())

    async def chunks(
        self, events: AsyncGenerator[Streamed], words: TextWords, include_usage: bool
    ) -> AsyncGenerator[TextChunk]:
        """A first chunk once the model has taken the request, then what it writes, then what it says. Closes `events`.

        Raises what `events` raises, in the client's words.
        """
        output: OmniRequestOutput | None = None
        begun, file = False, _Growing(self._format)
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    if not begun:
                        begun = True
                        yield self._chunk(TextDelta(role="assistant", content=""))
                    if isinstance(event, TextPiece):
                        for delta in self._read(event.text):
                            yield self._chunk(delta)
                    elif isinstance(event, SoundPiece) and (new := await file.add(event)):
                        yield self._chunk(self._heard(new))
                    elif isinstance(event, OmniRequestOutput):
                        output = event
            except InvalidRequestError as error:
                raise words.of(error) from None
        if output is None:
            raise GenerationError("the generation ended without an output")
        async for chunk in self._last(output, file):
            yield chunk
        if include_usage:
            usage = usage_of(output)
            yield TextChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)

    async def _last(self, output: OmniRequestOutput, file: _Growing) -> AsyncGenerator[TextChunk]:
        """What waits, and the end."""
        for piece in [] if self._reader is None else self._reader.end():
            if isinstance(piece, str):
                yield self._chunk(self._written(piece))
        if self._format is not None:
            if new := await file.finish():
                yield self._chunk(self._heard(new))
            expires = self._transcripts.keep(self._audio_id, output.text[0])
            yield self._chunk(TextDelta(audio=SpokenDelta(id=self._audio_id, expires_at=expires)))
        yield self._chunk(TextDelta(), output)

    def _read(self, text: str) -> list[TextDelta]:
        """What is certain of a piece of text: text that is none of a call, and calls that are complete."""
        if self._reader is None:
            return [self._written(text)]
        before = self._reader.calls
        pieces = self._reader.feed(text)
        numbers = itertools.count(before)
        return [
            self._written(piece) if isinstance(piece, str) else TextDelta(tool_calls=[_delta(next(numbers), piece)])
            for piece in pieces
        ]

    def _reason(self, output: OmniRequestOutput) -> Reason:
        (reason,) = output.finish_reason
        return "tool_calls" if reason == "stop" and self._reader is not None and self._reader.calls else reason

    def _written(self, text: str) -> TextDelta:
        """Text is the content, and what the speech will say."""
        spoken = None if self._format is None else SpokenDelta(id=self._audio_id, transcript=text)
        return TextDelta(content=text, audio=spoken)

    def _heard(self, data: bytes) -> TextDelta:
        return TextDelta(audio=SpokenDelta(id=self._audio_id, data=base64.b64encode(data).decode()))

    def _chunk(self, delta: TextDelta, ended: OmniRequestOutput | None = None) -> TextChunk:
        reason, seed = (None, None) if ended is None else (self._reason(ended), ended.seeds[0])
        choice = TextChunkChoice(delta=delta, finish_reason=reason)
        return TextChunk(id=self._id, created=self._created, model=self._model, choices=[choice], seed=seed)


class _Growing:
    """The file of an answer's speech, as it grows."""

    def __init__(self, format: AudioFormat | None) -> None:
        self._format = format
        self._file: SoundStream | None = None

    async def add(self, piece: SoundPiece) -> bytes:
        """The bytes that are new."""
        samples = samples_of(piece)
        if self._file is None:
            assert self._format is not None  # nobody asked for sound otherwise
            self._file = SoundStream(self._format, piece.samples.sample_rate or 0, len(samples))
        return await asyncio.to_thread(self._file.add, samples)

    async def finish(self) -> bytes:
        if self._file is None:
            raise GenerationError("the model made no sound")
        return await asyncio.to_thread(self._file.finish)


def usage_of(output: OmniRequestOutput) -> TextUsage:
    spent = output.metrics
    made = spent.completion_tokens + spent.audio_tokens
    return TextUsage(
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=made,
        total_tokens=spent.prompt_tokens + made,
        completion_tokens_details=CompletionDetails(
            audio_tokens=spent.audio_tokens, text_tokens=spent.completion_tokens
        ),
    )


def _function(call: ToolCall) -> CalledFunction:
    return CalledFunction(name=call.name, arguments=call.arguments)


def _call(call: ToolCall) -> Call:
    return Call(id=call.id, function=_function(call))


def _delta(index: int, call: ToolCall) -> CallDelta:
    return CallDelta(index=index, id=call.id, function=_function(call))


def _file(output: OmniRequestOutput, format: AudioFormat) -> str:
    """In base64. For a thread."""
    if not output.audio or output.sample_rate is None:
        raise GenerationError("the model made no sound")
    return base64.b64encode(encode_audio(np.asarray(output.audio[0]), output.sample_rate, format)).decode()

"""POST /v1/audio/speech: text in, speech out, as a file, or sentence by sentence as a stream.

Translates between the body's words and the sampling parameters, and encodes. Whether the model can do it is checked
behind it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from polymux.errors import GenerationError, InvalidRequestError
from polymux.media.audio import MEDIA_TYPES, AudioFormat
from polymux.media.sound_stream import SoundStream
from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput, samples_of
from polymux.request import Capabilities, SamplingParams, SoundPiece
from polymux.server.audio import FILE, sound_answer
from polymux.server.body import parse
from polymux.server.byte_stream import ByteStream
from polymux.server.deadline import within
from polymux.server.errors import responses
from polymux.server.generation import generate, while_connected
from polymux.server.image_request import refusals_counted
from polymux.server.recording import in_our_words, speech_params, uploaded
from polymux.server.seed import seed_of
from polymux.server.session import session_of
from polymux.server.speech_protocol import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage
from polymux.server.sse import STREAMED, StreamEvent, stream
from polymux.server.state import ServerState

_SCHEMA = {"content": {"application/json": {"schema": SpeechRequest.model_json_schema()}}, "required": True}
_FILE_OR_EVENTS = FILE | {"content": FILE["content"] | STREAMED[200]["content"]}
_DEFAULT: AudioFormat = "mp3"  # OpenAI's

Piece = tuple[bytes, OmniRequestOutput | None]  # the next bytes of the file; the last ones come with the output


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/audio/speech",
        response_class=Response,
        responses=responses(400, 404, 413, 429, 500, 503) | {200: _FILE_OR_EVENTS},
        openapi_extra={"requestBody": _SCHEMA},
    )
    async def create_speech(request: Request) -> Response:
        """Speech of a text. Leaving early cancels."""
        with refusals_counted(state):
            body = await parse(request, SpeechRequest)
            state.note(request, body.model, body.user)
            can = await reading_model(state)
            how = _streaming(body)
            params = await within(request, speech_params(state, body, can))
            if body.profile and how is not None:
                raise InvalidRequestError(
                    "profile=true: a stream has none; leave stream and stream_format out", param="profile"
                )
            params = replace(params, profile=bool(body.profile))
        if how is not None:  # the headers, which tell it, go out before the model's process has told one
            params = replace(params, seed=seed_of(params.seed, can))
        with in_our_words(uploaded(body, params)):
            return await _speech(state, request, body, params, how)

    return router


async def _speech(
    state: ServerState, request: Request, body: SpeechRequest, params: SamplingParams, how: str | None
) -> Response:
    format = body.response_format or _DEFAULT
    if how is None:
        output = await generate(state.omni, request, body.input, params)
        return await asyncio.to_thread(sound_answer, output, format)
    engine_id = f"{request.state.request_id}-{uuid.uuid4().hex[:8]}"
    source = state.omni.stream(body.input, params, request_id=engine_id, **session_of(request))
    pieces = pieces_of(while_connected(request, source), format)
    if how == "sse":
        return await stream(_events(pieces, format, uploaded(body, params)))
    first, _ = await anext(pieces)
    headers = {"x-seed": str(params.seed)}
    can = state.omni.capabilities
    if can is not None and can.sample_rate is not None:
        headers["x-sample-rate"] = str(can.sample_rate)
    return ByteStream(first, _bytes(pieces), MEDIA_TYPES[format], headers)


def _streaming(body: SpeechRequest) -> str | None:
    """How the answer is streamed; None: it is not."""
    if body.stream is False and body.stream_format is not None:
        raise InvalidRequestError(f"stream_format={body.stream_format!r}: stream is false", param="stream_format")
    return body.stream_format or ("audio" if body.stream else None)


async def pieces_of(source: AsyncGenerator[Streamed], format: AudioFormat) -> AsyncGenerator[Piece]:
    """The bytes of the file as it grows, of what `Generator.stream` gives; closes it. Raises PolymuxError."""
    file: SoundStream | None = None
    async with contextlib.aclosing(source) as events:
        async for event in events:
            if isinstance(event, SoundPiece):
                samples = samples_of(event)
                if file is None:
                    file = SoundStream(format, event.samples.sample_rate or 0, len(samples))
                if new := await asyncio.to_thread(file.add, samples):
                    yield new, None
            elif isinstance(event, OmniRequestOutput):
                if file is None:
                    raise GenerationError("the model made no sound")
                yield await asyncio.to_thread(file.finish), event
                return
    raise GenerationError("the generation ended without an output")


async def _bytes(pieces: AsyncGenerator[Piece]) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(pieces):
        async for new, _ in pieces:
            if new:
                yield new


async def _events(
    pieces: AsyncGenerator[Piece], format: AudioFormat, voice: str | None
) -> AsyncGenerator[StreamEvent | None]:
    with in_our_words(voice):
        async with contextlib.aclosing(pieces):
            async for new, output in pieces:
                if new:
                    yield SpeechDelta(audio=base64.b64encode(new).decode(), response_format=format)
                if output is not None:
                    yield SpeechDone(usage=usage_of(output), seed=output.seeds[0])


def usage_of(output: OmniRequestOutput) -> SpeechUsage:
    read, steps = output.metrics.text_tokens, output.metrics.steps
    return SpeechUsage(input_tokens=read, output_tokens=steps, total_tokens=read + steps)


async def reading_model(state: ServerState) -> Capabilities:
    """What the model can do. Raises NotReadyError, and InvalidRequestError if it does not speak what it is told to."""
    can = await speaking_model(state)
    if can.chats:
        where = "POST /v1/chat/completions has it answer"
        raise InvalidRequestError(f"the model says what it likes, not what it is told; {where}", param="model")
    return can


async def speaking_model(state: ServerState) -> Capabilities:
    """What the model can do. Raises NotReadyError, and InvalidRequestError if it does not speak."""
    can = await state.model()
    if can.voices:
        return can
    where = "POST /v1/audio/generate makes it" if can.modality == "audio" else f"it makes {can.modality}"
    raise InvalidRequestError(f"the model does not speak; {where}", param="model")

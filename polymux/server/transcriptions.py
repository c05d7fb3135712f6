"""POST /v1/audio/transcriptions: a recording in, what is said in it out, as text or with times.

Translates between the form's words and the sampling parameters. Whether the model can do it is checked behind it.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field, WithJsonSchema

from polymux.errors import GenerationError, InvalidRequestError
from polymux.media import subtitles
from polymux.media.audio import Sound, resample
from polymux.media.decode import MediaLimits, decode_audio
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import OmniPrompt
from polymux.request import Capabilities, SamplingParams
from polymux.sampling import HEARD
from polymux.server.deadline import within
from polymux.server.errors import responses
from polymux.server.forms import MEDIA_TYPE, parse_form
from polymux.server.generation import generate
from polymux.server.image_request import refusals_counted
from polymux.server.profile_answer import profile_header
from polymux.server.protocol import Body
from polymux.server.recording import Recording
from polymux.server.schemas import schema_of
from polymux.server.state import ServerState

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_TIMED = ("srt", "verbose_json", "vtt")
_FILE = "file"


class TranscriptionRequest(Body):
    """POST /v1/audio/transcriptions"""

    model: str | None = None
    language: str | None = Field(None, description="one of the model's, such as en; left out: it listens which it is")
    prompt: str | None = Field(None, description="what was said before, or how its words are written")
    response_format: Format | None = Field(None, description="default json")
    temperature: float | None = Field(None, description="of the tokens that are drawn; 0: none are")
    timestamp_granularities: tuple[Literal["segment"], ...] | None = Field(
        None, description="segment, with verbose_json; there are no times of words"
    )
    stream: Literal[False] | None = Field(None, description="a transcript comes when it is complete")
    seed: int | None = Field(None, description="left out: drawn, if tokens are")
    profile: bool | None = Field(None, description="tell in the header x-profile where the time went")
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")


class _TranscriptionForm(TranscriptionRequest):
    file: Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})] = Field(
        description="WAV, FLAC, MP3, Ogg, or the sound of a video; or its URL"
    )


class Duration(BaseModel):
    type: Literal["duration"] = "duration"
    seconds: int = Field(description="of the recording, rounded up")


class Transcription(BaseModel):
    text: str
    usage: Duration


class TranscriptionSegment(BaseModel):
    id: int
    start: float = Field(description="seconds")
    end: float
    text: str
    tokens: list[int]


class VerboseTranscription(Transcription):
    task: Literal["transcribe"] = "transcribe"
    language: str | None = Field(description="that was asked for, or heard; null: the model does not tell")
    duration: float = Field(description="seconds of the recording")
    segments: list[TranscriptionSegment]


_SCHEMA: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": schema_of(_TranscriptionForm)}}, "required": True}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Transcription | VerboseTranscription,
        "content": {"text/plain": {"schema": {"type": "string"}}, "text/vtt": {"schema": {"type": "string"}}},
    }
}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/audio/transcriptions",
        response_class=Response,
        responses=responses(400, 404, 413, 429, 500, 503) | _ANSWERS,
        openapi_extra={"requestBody": _SCHEMA},
    )
    async def create_transcription(request: Request) -> Response:
        """What is said in a recording. Leaving early cancels."""
        with refusals_counted(state):
            body, files = await parse_form(request, TranscriptionRequest, (_FILE,))
            state.note(request, body.model, body.user)
            can = await _listening_model(state, body)
            heard = await within(request, _heard(state, files[_FILE], can))
        params = SamplingParams(
            language=body.language, temperature=body.temperature, seed=body.seed, profile=bool(body.profile)
        )
        prompt: OmniPrompt = {"prompt": body.prompt or "", "multi_modal_data": {HEARD: heard}}
        try:
            output = await generate(state.omni, request, prompt, params)
        except InvalidRequestError as error:
            if error.param != HEARD:
                raise
            raise type(error)(error.message.replace(HEARD, _FILE, 1), param=_FILE) from None
        answer = _answer(output, body.response_format or "json", heard[0].shape[1] / heard[1])
        answer.headers.update(profile_header(output.profile))
        return answer

    return router


async def _listening_model(state: ServerState, body: TranscriptionRequest) -> Capabilities:
    can = await state.model()
    if not can.transcribes:
        raise InvalidRequestError(f"the model does not listen to recordings; it makes {can.modality}", param="model")
    format = body.response_format or "json"
    if format in _TIMED and not can.timestamps:
        why = "this checkpoint knows no timestamps; allowed are json, text"
        raise InvalidRequestError(f"response_format={format!r}: {why}", param="response_format")
    if body.timestamp_granularities and format != "verbose_json":
        what = "timestamp_granularities: acts only with response_format verbose_json"
        raise InvalidRequestError(what, param="timestamp_granularities")
    return can


async def _heard(state: ServerState, sources: list[str | bytes], can: Capabilities) -> Recording:
    if len(sources) != 1:
        raise InvalidRequestError(f"{_FILE}: {len(sources)} are given, one is needed", param=_FILE)
    (source,) = sources
    most = state.config.media.max_media_bytes
    data = await state.media.fetch(source, param=_FILE, max_bytes=most) if isinstance(source, str) else source
    seconds = state.omni.config.limits.max_input_audio_seconds
    limits = MediaLimits(file_bytes=most, pixels=1, frames=1, seconds=seconds)
    heard = await asyncio.to_thread(_decoded, data, limits, can.hears_at)
    state.media.held.add_array(heard[0])
    return heard


def _decoded(data: bytes, limits: MediaLimits, rate: int | None) -> Recording:
    """In a thread. One channel at the model's rate: there is no need to carry more to its process."""
    sound = decode_audio(data, limits, param=_FILE)
    samples = sound.samples.mean(axis=0, keepdims=True, dtype=np.float32)
    if rate is None or rate == sound.sample_rate:
        return samples, sound.sample_rate
    resampled = resample(Sound(samples, sound.sample_rate), rate)
    if not resampled.shape[1]:
        raise InvalidRequestError(f"{_FILE}: it is too short to be heard", param=_FILE)
    return resampled, rate


def _answer(output: OmniRequestOutput, format: Format, seconds: float) -> Response:
    if not output.text:
        raise GenerationError("the model wrote no text")
    (text,) = output.text
    usage = Duration(seconds=math.ceil(seconds))
    match format:
        case "text":
            return PlainTextResponse(text + "\n")
        case "srt":
            return PlainTextResponse(subtitles.srt(output.segments))
        case "vtt":
            return PlainTextResponse(subtitles.vtt(output.segments), media_type="text/vtt")
        case "json":
            return JSONResponse(Transcription(text=text, usage=usage).model_dump())
        case "verbose_json":
            segments = [
                TranscriptionSegment(id=i, start=s.start, end=s.end, text=s.text, tokens=s.tokens)
                for i, s in enumerate(output.segments)
            ]
            verbose = VerboseTranscription(
                text=text, usage=usage, language=output.language, duration=round(seconds, 3), segments=segments
            )
            return JSONResponse(verbose.model_dump())

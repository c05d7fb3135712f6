"""GET, POST and DELETE /v1/audio/voices: the model's voices, and those that clients upload."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, WithJsonSchema

from polymux.errors import InvalidRequestError
from polymux.media.wire import Array
from polymux.request import Capabilities
from polymux.sampling import REFERENCE
from polymux.server.errors import responses
from polymux.server.forms import MEDIA_TYPE, parse_form
from polymux.server.protocol import Body
from polymux.server.recording import check_hears, check_takes_vectors, recording_of
from polymux.server.schemas import schema_of
from polymux.server.speech import speaking_model
from polymux.server.state import ServerState
from polymux.server.voice_store import VoiceRecord, check_name

_NO = {"", "0", "false", "no", "none", "off"}  # what a consent that is none looks like
_FILE = "audio_sample"


class UploadedVoice(BaseModel):
    name: str
    consent: str
    created_at: int = Field(description="seconds since 1970")
    file_size: int = Field(description="bytes")
    seconds: float | None = Field(description="of a recording; null: it is a vector")
    sample_rate: int | None
    embedding_dim: int | None = Field(description="values of a vector; null: it is a recording")
    ref_text: str | None
    speaker_description: str | None


class VoiceList(BaseModel):
    """GET /v1/audio/voices"""

    voices: list[str] = Field(
        description="that a request may name: the model's own, then those uploaded ones that it speaks with"
    )
    default: str = Field(description="speaks if a request names none")
    languages: list[str] = Field(description="that a request may name; empty: it has no say")
    uploaded_voices: list[UploadedVoice]


class VoiceAdded(BaseModel):
    """As OpenAI's SDKs read it, and as the list has it."""

    id: str = Field(description="the name")
    object: Literal["audio.voice"] = "audio.voice"
    type: Literal["audio_sample"] = "audio_sample"
    name: str
    created_at: int
    success: bool = True
    voice: UploadedVoice


class VoiceDeleted(BaseModel):
    id: str
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"
    deleted: bool = True
    success: bool = True
    message: str


class VoiceUpload(Body):
    """POST /v1/audio/voices"""

    name: str = Field(description="1 to 64 letters, digits and ._-")
    consent: str = Field(max_length=1000, description="that of the speaker: who gave it, or where it is recorded")
    ref_text: str | None = Field(None, description="what is said in the recording; else a request must say it")
    speaker_description: str | None = Field(None, max_length=1000)
    speaker_embedding: tuple[float, ...] | None = Field(None, description="a vector, in place of a recording")
    type: Literal["audio_sample"] | None = Field(None, description="voices are not made of prompts")


class _VoiceForm(VoiceUpload):
    audio_sample: Annotated[bytes | None, WithJsonSchema({"type": "string", "format": "binary"})] = Field(
        None, description="the recording: WAV, FLAC, MP3, Ogg; or its URL"
    )


_SCHEMA: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": schema_of(_VoiceForm)}}, "required": True}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/audio/voices", responses=responses(400, 503))
    async def list_voices() -> VoiceList:
        """The voices of the model, and those that were uploaded."""
        can = await speaking_model(state)
        uploaded = await asyncio.to_thread(state.voices.all)
        names = [*can.voices, *(v.name for v in uploaded if v.name not in can.voices and _speaks_with(can, v))]
        return VoiceList(
            voices=names,
            default=can.voices[0],
            languages=list(can.languages),
            uploaded_voices=[_shown(voice) for voice in uploaded],
        )

    @router.post("/v1/audio/voices", responses=responses(400, 413, 503, 507), openapi_extra={"requestBody": _SCHEMA})
    async def upload_voice(request: Request) -> VoiceAdded:
        """A recording, or a vector, whose voice speaks from now on when a request names it."""
        body, files = await parse_form(request, VoiceUpload, (_FILE,))
        can = await speaking_model(state)
        _check(body, can, state.omni.config.limits.max_prompt_length)
        if len(files[_FILE]) + (body.speaker_embedding is not None) != 1:
            raise InvalidRequestError(f"{_FILE}: give one, or speaker_embedding in its place", param=_FILE)
        record = VoiceRecord(
            name=body.name,
            consent=body.consent,
            created_at=int(time.time()),
            ref_text=body.ref_text,
            speaker_description=body.speaker_description,
        )
        values: Array
        if body.speaker_embedding is not None:
            values = _vector(body, body.speaker_embedding, can)
            record = dataclasses.replace(record, embedding_dim=values.size)
        else:
            check_hears(can, _FILE)
            values, rate = await recording_of(state, files[_FILE][0], _FILE, state.config.voices.max_voice_bytes)
            record = dataclasses.replace(record, sample_rate=rate, seconds=round(values.shape[1] / rate, 3))
        kept = _shown(await asyncio.to_thread(state.voices.add, record, values))
        return VoiceAdded(id=kept.name, name=kept.name, created_at=kept.created_at, voice=kept)

    @router.delete("/v1/audio/voices/{name}", responses=responses(400, 404, 503))
    async def delete_voice(name: str) -> VoiceDeleted:
        """Remove an uploaded voice. Requests under way keep it."""
        await asyncio.to_thread(state.voices.delete, name)
        return VoiceDeleted(id=name, message=f"the voice {name!r} is deleted")

    return router


def _speaks_with(can: Capabilities, voice: VoiceRecord) -> bool:
    """The folder may have voices that were uploaded for another model."""
    if voice.sample_rate is None:
        return can.embedding_size is not None and voice.embedding_dim == can.embedding_size
    return REFERENCE in can.media


def _check(body: VoiceUpload, can: Capabilities, most: int) -> None:
    """Raises InvalidRequestError for a name, a consent or a text that is none. `most`: characters of a text."""
    check_name(body.name)
    if body.name in can.voices:
        raise InvalidRequestError(f"name={body.name!r}: the model has a voice of this name", param="name")
    if body.consent.strip().lower() in _NO:
        raise InvalidRequestError(f"consent={body.consent!r}: the speaker's is needed", param="consent")
    for field in ("ref_text", "speaker_description"):
        _check_length(field, getattr(body, field), most)


def _vector(body: VoiceUpload, given: Sequence[float], can: Capabilities) -> Array:
    check_takes_vectors(can, "speaker_embedding", len(given))
    if body.ref_text is not None:
        raise InvalidRequestError("ref_text: says nothing of a vector", param="ref_text")
    with np.errstate(over="ignore"):
        values = np.array(given, np.float32)
    if not np.isfinite(values).all():
        raise InvalidRequestError("speaker_embedding: values are too large", param="speaker_embedding")
    return values


def _check_length(field: str, text: str | None, most: int) -> None:
    if text is None:
        return
    if len(text) > most:
        what = f"{field} has {len(text)} characters: allowed are {most} (--max-prompt-length)"
        raise InvalidRequestError(what, param=field)
    if not text.strip():
        raise InvalidRequestError(f"{field}={text!r}: is empty", param=field)


def _shown(voice: VoiceRecord) -> UploadedVoice:
    return UploadedVoice(**dataclasses.asdict(voice))

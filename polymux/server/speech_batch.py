"""POST /v1/audio/speech/batch: several texts in one request, each with its own voice and settings, or with shared ones.

What is wrong with one item is that item's error; the others are spoken. They are requests of their own to the engine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import uuid
from typing import Annotated, Any, Literal

import pydantic_core
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from polymux.errors import GenerationError, InvalidRequestError, PolymuxError
from polymux.media.audio import MEDIA_TYPES, AudioFormat, encode_audio
from polymux.omni_output import OmniRequestOutput
from polymux.request import Capabilities
from polymux.server.body import parse
from polymux.server.errors import error_body, from_validation, responses
from polymux.server.generation import connected
from polymux.server.image_request import refusals_counted
from polymux.server.protocol import ErrorDetail
from polymux.server.recording import in_our_words, speech_params, uploaded
from polymux.server.schemas import schema_of
from polymux.server.session import Session, session_of
from polymux.server.speech import reading_model, usage_of
from polymux.server.speech_protocol import SpeechFields, SpeechUsage
from polymux.server.state import ServerState

MAX_ITEMS = 32
_DEFAULT: AudioFormat = "mp3"  # that of /v1/audio/speech
_SPEAKER = ("voice", "ref_audio", "ref_text", "speaker_embedding")  # who speaks


class SpeechItem(SpeechFields):
    """One text. What it does not say is as the batch says."""

    input: str = Field(description="the text")


Item = Annotated[dict[str, Any], WithJsonSchema(schema_of(SpeechItem))]


class SpeechBatchRequest(SpeechFields):
    """POST /v1/audio/speech/batch. What it says holds for every item that does not say otherwise."""

    items: tuple[Item, ...] = Field(min_length=1, max_length=MAX_ITEMS, description="texts, with fields as above")


class SpeechBatchResult(BaseModel):
    index: int = Field(description="of the item; results are in the order of the items")
    status: Literal["success", "error"]
    audio_data: str | None = Field(default=None, description="the file, in base64")
    media_type: str | None = None
    seed: int | None = None
    usage: SpeechUsage | None = None
    error: ErrorDetail | None = None


class SpeechBatchAnswer(BaseModel):
    id: str
    results: list[SpeechBatchResult]
    total: int
    succeeded: int
    failed: int


_SCHEMA = {"content": {"application/json": {"schema": schema_of(SpeechBatchRequest)}}, "required": True}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/audio/speech/batch",
        responses=responses(400, 404, 413, 503),
        openapi_extra={"requestBody": _SCHEMA},
    )
    async def create_speech_batch(request: Request) -> SpeechBatchAnswer:
        """Speech of several texts. An item that fails fails alone. Leaving early cancels all."""
        with refusals_counted(state):
            body = await parse(request, SpeechBatchRequest)
            state.note(request, body.model, body.user)
            session = session_of(request)
            can = await reading_model(state)
        results = await connected(request, _all(state, request, body, can, session))
        succeeded = sum(result.status == "success" for result in results)
        return SpeechBatchAnswer(
            id=f"speech-batch-{uuid.uuid4().hex}",
            results=results,
            total=len(results),
            succeeded=succeeded,
            failed=len(results) - succeeded,
        )

    return router


async def _all(
    state: ServerState, request: Request, body: SpeechBatchRequest, can: Capabilities, session: Session
) -> list[SpeechBatchResult]:
    shared = body.model_dump(exclude={"items"}, exclude_none=True)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _one(state, f"{request.state.request_id}-{uuid.uuid4().hex[:8]}", i, fields, can, session)
            )
            for i, fields in enumerate(_fields(shared, own) for own in body.items)
        ]
    return [task.result() for task in tasks]


def _fields(shared: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """What holds for an item. If it says anything of who speaks, nothing of that is taken from the batch."""
    given = {name: value for name, value in item.items() if value is not None}
    if "speaker" in given and "voice" not in given:
        given["voice"] = given.pop("speaker")
    if any(name in given for name in _SPEAKER):
        shared = {name: value for name, value in shared.items() if name not in _SPEAKER}
    return shared | given


async def _one(
    state: ServerState, engine_id: str, index: int, fields: dict[str, Any], can: Capabilities, session: Session
) -> SpeechBatchResult:
    """Raises nothing that is one item's own."""
    try:
        with refusals_counted(state):
            item = _item(fields)
            state.check_model(item.model)
            params = await speech_params(state, item, can)
        format = item.response_format or _DEFAULT
        with in_our_words(uploaded(item, params)):
            source = state.omni.generate(item.input, params, request_id=engine_id, **session)
            async with contextlib.aclosing(source) as events:
                async for event in events:
                    if isinstance(event, OmniRequestOutput):
                        return await asyncio.to_thread(_result, index, event, format)
        raise GenerationError("the generation ended without an output")
    except PolymuxError as error:
        return SpeechBatchResult(index=index, status="error", error=error_body(error).error)


def _item(fields: dict[str, Any]) -> SpeechItem:
    try:
        return SpeechItem.model_validate_json(pydantic_core.to_json(fields))
    except ValidationError as error:
        raise from_validation(error, SpeechItem) from None
    except pydantic_core.PydanticSerializationError:
        raise InvalidRequestError("the item is not valid JSON") from None


def _result(index: int, output: OmniRequestOutput, format: AudioFormat) -> SpeechBatchResult:
    """In a thread: it encodes."""
    if not output.audio or output.sample_rate is None:
        raise GenerationError("the model made no sound")
    file = encode_audio(output.audio[0], output.sample_rate, format)
    return SpeechBatchResult(
        index=index,
        status="success",
        audio_data=base64.b64encode(file).decode(),
        media_type=MEDIA_TYPES[format],
        seed=output.seeds[0],
        usage=usage_of(output),
    )

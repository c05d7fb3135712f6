"""GET /v1/models: the one model that is served, and what it takes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from polymux.request import Capabilities
from polymux.sampling import FIELDS as SAMPLING_FIELDS
from polymux.server.errors import responses
from polymux.server.state import ServerState
from polymux.validation import ARGUMENT_FIELDS, is_extra


class ModelLimits(BaseModel):
    """What a request may ask for here."""

    max_inference_steps: int
    max_num_outputs: int
    max_generated_image_size: int = Field(description="pixels")
    max_num_frames: int
    max_audio_seconds: float = Field(description="of one sound")
    max_prompt_length: int = Field(description="characters")
    max_input_audio_seconds: float = Field(description="of a sound that is to be written down")
    max_ref_audio_seconds: float = Field(description="of a recording of a voice to speak with")
    max_body_bytes: int
    max_total_body_bytes: int = Field(description="of all requests under way together")
    max_header_bytes: int
    max_json_depth: int = Field(description="levels of a body")
    max_json_values: int = Field(description="values in a body")
    max_connections: int
    receive_timeout: float = Field(description="seconds that the headers, and then the body, may take to arrive")
    send_timeout: float = Field(description="seconds that a client may take nothing of its answer")
    speech_idle_timeout: float = Field(description="seconds that a WebSocket for speech may be idle")
    realtime_idle_timeout: float = Field(description="seconds that a session of /v1/realtime may be idle")
    request_timeout: float | None = Field(description="seconds until a request is given up; null: no limit")
    max_media_bytes: int = Field(description="of one file")
    max_total_media_bytes: int = Field(description="of the decoded media of all requests under way together")
    max_input_image_size: int = Field(description="pixels")
    max_media_redirects: int = Field(description="that fetching a URL follows")
    media_fetch_timeout: float = Field(description="seconds that fetching a URL may take")


class ModelAbilities(BaseModel):
    """What the loaded pipeline takes."""

    family: str | None = Field(description="null: a pipeline without a declaration of its own")
    pipeline: str
    modality: str
    makes: list[str] = Field(description="what an answer may consist of")
    chats: bool = Field(description="answers conversations with text")
    context: int | None = Field(description="tokens of a conversation and its answer together; null: not known")
    fields: list[str] = Field(description="optional fields that it takes")
    extra_args: list[str] = Field(description="names that extra_args may hold")
    refused: dict[str, str] = Field(description="fields that would have no effect, and why")
    required: list[str]
    media: dict[str, int] = Field(description="media arguments, and how many items each takes")
    alpha: bool = Field(description="pictures have an alpha channel")
    variations: bool = Field(description="makes variations of a picture")
    picture_sized: bool = Field(description="what comes out is as large as the picture that came in, or as size says")
    previews: bool = Field(description="a stream may have partial_images; if not, `refused` says why")
    size_multiple: int = Field(description="width and height must be multiples of it")
    lora: bool = Field(description="requests may name adapters")
    frame_interpolation: bool = Field(description="a request may have enable_frame_interpolation")
    voices: list[str] = Field(description="of a model that speaks; the first is the default")
    languages: list[str] = Field(description="that a request may name")
    frames_multiple: int = Field(description="num_frames must be 1 more than a multiple of it")
    defaults: dict[str, int] = Field(
        description="height, width, num_frames, and a seed that is not drawn, that it uses if they are left out"
    )
    fps: float | None = Field(description="frames per second of its videos, unless a request says otherwise")
    sample_rate: int | None = Field(description="samples per second of its sound")
    max_seconds: float | None = Field(description="of a sound; null: as far as is known, only limits.max_audio_seconds")
    tool_calls: str | None = Field(description="how it writes calls of tools; null: it takes no tools")
    merges: bool = Field(description="whether requests are batched")
    dtype: str
    parameters: int
    features: list[str] = Field(description="what of polymux it can have, by the names in compatibility.md")
    quantized: dict[str, str] = Field(description="components whose weights are kept in few bits, and how")
    fixed_size: bool = Field(description="pictures have the default size, and no other")
    answers: ModelAbilities | None = Field(
        description="of a model that makes pictures, and answers conversations with text too: what those may hold"
    )


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["polymux"] = "polymux"
    ready: bool
    adapters: list[str] = Field(description="names that `lora` may hold")
    limits: ModelLimits
    capabilities: ModelAbilities | None = Field(description="null until the model is loaded")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[_model(state)])

    @router.get("/v1/models/{name:path}", responses=responses(404))
    async def get_model(name: str) -> Model:
        state.check_model(name)
        return _model(state)

    return router


def _model(state: ServerState) -> Model:
    return Model(
        id=state.model_names[0],
        created=state.created,
        ready=state.omni.status == "ready",
        adapters=sorted(state.adapters.named),
        limits=_limits(state),
        capabilities=_abilities(state),
    )


def _limits(state: ServerState) -> ModelLimits:
    groups = (state.omni.config.limits, state.config.http, state.config.media)
    values = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
    return ModelLimits.model_validate({name: values[name] for name in ModelLimits.model_fields})


def _abilities(state: ServerState) -> ModelAbilities | None:
    can = state.omni.capabilities
    return None if can is None else _shown(can)


def _shown(can: Capabilities) -> ModelAbilities:
    takes = [name for name in can.arguments if name not in can.refused and name not in can.media]
    fields = SAMPLING_FIELDS if can.samples else ARGUMENT_FIELDS
    return ModelAbilities(
        family=can.family,
        pipeline=can.pipeline,
        modality=can.modality,
        makes=list(can.makes or (can.modality,)),
        chats=can.chats,
        context=can.context,
        fields=sorted(name for name in takes if name in fields),
        extra_args=sorted(name for name in takes if name not in fields and is_extra(name)),
        refused=can.refused,
        required=list(can.required),
        media=can.media,
        alpha=can.alpha,
        variations=can.variations,
        picture_sized=can.picture_sized,
        previews=can.previews,
        size_multiple=can.size_multiple,
        lora=can.lora,
        frame_interpolation=can.frame_interpolation,
        voices=list(can.voices),
        languages=list(can.languages),
        frames_multiple=can.frames_multiple,
        defaults=can.defaults,
        fps=can.fps,
        sample_rate=can.sample_rate,
        max_seconds=can.max_seconds,
        tool_calls=can.tool_calls,
        merges=can.merges,
        dtype=can.dtype,
        parameters=can.parameters,
        features=list(can.features),
        quantized=can.quantized,
        fixed_size=can.fixed_size,
        answers=None if can.answers is None else _shown(can.answers),
    )

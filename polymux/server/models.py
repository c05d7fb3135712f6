"""GET /v1/models: the one model that is served, and what it takes."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from polymux.server.errors import responses
from polymux.server.state import ServerState
from polymux.validation import ARGUMENT_FIELDS


class ModelLimits(BaseModel):
    """What a request may ask for here."""

    max_inference_steps: int
    max_num_outputs: int
    max_generated_image_size: int = Field(description="pixels")
    max_num_frames: int
    max_audio_seconds: float = Field(description="of one sound")
    max_prompt_length: int = Field(description="characters")


class ModelAbilities(BaseModel):
    """What the loaded pipeline takes."""

    family: str | None = Field(description="null: a pipeline without a declaration of its own")
    pipeline: str
    modality: str
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
    frames_multiple: int = Field(description="num_frames must be 1 more than a multiple of it")
    defaults: dict[str, int] = Field(description="height, width and num_frames that it uses if they are left out")
    fps: float | None = Field(description="frames per second of its videos, unless a request says otherwise")
    sample_rate: int | None = Field(description="samples per second of its sound")
    max_seconds: float | None = Field(description="of a sound; null: as far as is known, only limits.max_audio_seconds")
    merges: bool = Field(description="whether requests are batched")
    dtype: str
    parameters: int


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["polymux"] = "polymux"
    ready: bool
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
    limits: Any = state.omni.config.limits
    return Model(
        id=state.model_names[0],
        created=state.created,
        ready=state.omni.status == "ready",
        limits=ModelLimits.model_validate(limits, from_attributes=True),
        capabilities=_abilities(state),
    )


def _abilities(state: ServerState) -> ModelAbilities | None:
    can = state.omni.capabilities
    if can is None:
        return None
    takes = [name for name in can.arguments if name not in can.refused and name not in can.media]
    return ModelAbilities(
        family=can.family,
        pipeline=can.pipeline,
        modality=can.modality,
        fields=sorted(name for name in takes if name in ARGUMENT_FIELDS),
        extra_args=sorted(name for name in takes if name not in ARGUMENT_FIELDS and name != "prompt"),
        refused=can.refused,
        required=list(can.required),
        media=can.media,
        alpha=can.alpha,
        variations=can.variations,
        picture_sized=can.picture_sized,
        previews=can.previews,
        size_multiple=can.size_multiple,
        frames_multiple=can.frames_multiple,
        defaults=can.defaults,
        fps=can.fps,
        sample_rate=can.sample_rate,
        max_seconds=can.max_seconds,
        merges=can.merges,
        dtype=can.dtype,
        parameters=can.parameters,
    )

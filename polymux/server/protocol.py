"""The bodies of HTTP requests and answers: names, JSON types, and the values that mean something here.

Ranges that depend on the model or on the operator's limits are not known here; `polymux.validation` checks those, once,
for every way in.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from polymux.media.image import ImageFormat

_SIZE = re.compile(r"[1-9][0-9]{0,8}x[1-9][0-9]{0,8}|auto")


def _check_size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise PydanticCustomError("size", "must be WIDTHxHEIGHT in pixels, such as 1024x768, or auto")
    return value


Size = Annotated[str, AfterValidator(_check_size), Field(examples=["1024x768", "auto"])]


class Body(BaseModel):
    """A JSON object with exactly the declared fields. Values are taken as they are: "2" is not 2, NaN is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SamplingFields(Body):
    """How to generate: what every route for pictures takes, under the same names. null counts as not given."""

    n: int | None = Field(None, description="pictures; picture i is the one of seed + i")
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto; left out: the model's own")
    seed: int | None = Field(None, description="left out: drawn, and told in the answer")
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = Field(None, description="of the low-noise denoiser, where there are two")
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    sigmas: tuple[float, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    max_sequence_length: int | None = Field(None, description="tokens of the prompt")
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own pipeline")


class EncodingFields(Body):
    """How pictures come back."""

    output_format: ImageFormat | None = Field(None, description="default png")
    output_compression: int | None = Field(None, ge=0, le=100, description="quality of jpeg and webp, default 100")
    background: Literal["auto"] | None = None


class ImageFields(SamplingFields, EncodingFields):
    """What the routes below /v1/images/ have in common."""

    model: str | None = None
    response_format: Literal["b64_json"] | None = None
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")

    # Choices that OpenAI's own models offer. Only the value that changes nothing is accepted.
    quality: Literal["auto", "standard"] | None = None
    moderation: Literal["auto"] | None = None
    stream: Literal[False] | None = None


class ImageGenerationRequest(ImageFields):
    """POST /v1/images/generations"""

    prompt: str


class GeneratedImage(BaseModel):
    b64_json: str
    seed: int | None = Field(None, description="gives this picture again, with n = 1; null: no single seed made it")


class ImagesResponse(BaseModel):
    created: int = Field(description="seconds since 1970")
    data: list[GeneratedImage]
    output_format: ImageFormat
    size: str = Field(description="WIDTHxHEIGHT of the first picture, as decoded")
    seed: int | None = Field(None, description="of the first picture")


class SleepRequest(Body):
    """POST /v1/omni/sleep"""

    stage_ids: list[Literal[0]] | None = Field(default=None, description="there is one stage")
    level: Literal[1, 2] = Field(
        default=1, description="1: weights to host memory; 2: weights dropped, loaded again later"
    )


class SleepResponse(BaseModel):
    status: Literal["asleep"] = "asleep"
    level: int
    freed_bytes: int = Field(description="memory of the device that others have now")


class WakeUpResponse(BaseModel):
    status: Literal["ready"] = "ready"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    error: ErrorDetail

"""The bodies of HTTP requests and answers: names, JSON types, and the values that mean something here.

Ranges that depend on the model or on the operator's limits are not known here; `polymux.validation` checks those, once,
for every way in.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from polymux.media.image import ImageFormat
from polymux.server.profile_answer import RequestProfile

UNION_TAG = "~"  # begins the tags of unions' members, which are no fields and have no place in an error
_SIZE = re.compile(r"[1-9][0-9]{0,8}x[1-9][0-9]{0,8}|auto")


def _check_size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise PydanticCustomError("size", "must be WIDTHxHEIGHT in pixels, such as 1024x768, or auto")
    return value


Size = Annotated[str, AfterValidator(_check_size), Field(examples=["1024x768", "auto"])]


class Body(BaseModel):
    """A JSON object with exactly the declared fields. Values are taken as they are: "2" is not 2, NaN is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class AdapterField(Body):
    """An adapter of one request: a name that has been given to it, or a path that is allowed."""

    name: str | None = Field(None, description="as given by POST /v1/load_lora_adapter")
    path: str | None = Field(None, description="in a folder of --allowed-lora-path, from there or absolute")
    scale: float = Field(1.0, description="-100 to 100")
    component: str | None = Field(None, description="the denoiser that it is for, where there are two")


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, dict) else value


Adapters = Annotated[
    tuple[AdapterField, ...] | None,
    BeforeValidator(_listed),
    Field(description="adapters that act on this request: one, or a list"),
]


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
    lora: Adapters = None
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own pipeline")


class EncodingFields(Body):
    """How pictures come back."""

    output_format: ImageFormat | None = Field(None, description="default png")
    output_compression: int | None = Field(None, ge=0, le=100, description="quality of jpeg and webp, default 100")
    background: Literal["auto", "transparent", "opaque"] | None = Field(
        None, description="transparent: where the model makes alpha; opaque: over white"
    )


class ImageFields(SamplingFields, EncodingFields):
    """What the routes below /v1/images/ have in common."""

    model: str | None = None
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="default b64_json; url: a URL of this server, for some time"
    )
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")
    profile: bool | None = Field(None, description="tell in the answer where the time went; not with stream")

    # Choices that OpenAI's own models offer. Only the value that changes nothing is accepted.
    quality: Literal["auto", "standard"] | None = None
    moderation: Literal["auto"] | None = None


class StreamFields(Body):
    """For an answer in pieces."""

    stream: bool | None = Field(None, description="answer with server-sent events")
    partial_images: int | None = Field(
        None, ge=0, le=3, description="previews of each picture, with stream; fewer if there are fewer steps"
    )
    stream_progress: bool | None = Field(None, description="tell the steps too, with stream")


class ImageGenerationRequest(ImageFields, StreamFields):
    """POST /v1/images/generations"""

    prompt: str


class ImageEditFields(ImageFields, StreamFields):
    """POST /v1/images/edits, without the pictures: what is plain in a form."""

    prompt: str
    strength: float | None = Field(None, description="0 to 1: how far the picture is changed")


def _urls_of(value: object) -> tuple[str, ...]:
    """One reference or a list of them, as URLs."""
    return tuple(map(_url_of, value if isinstance(value, (list, tuple)) else (value,)))


def _url_of(value: object) -> str:
    match value:
        case str():
            return value
        case {"image_url": str() as url, **others} if not others:
            return url
    raise PydanticCustomError("reference", 'must be a data: or http(s) URL, or {"image_url": URL}')


_REFERENCE: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "description": "data: or http(s) URL"},
        {
            "type": "object",
            "properties": {"image_url": {"type": "string"}},
            "required": ["image_url"],
            "additionalProperties": False,
        },
    ]
}
_LIST = {"anyOf": [*_REFERENCE["anyOf"], {"type": "array", "items": _REFERENCE}]}

Reference = Annotated[str, BeforeValidator(_url_of), WithJsonSchema(_REFERENCE)]
References = Annotated[tuple[str, ...], BeforeValidator(_urls_of), WithJsonSchema(_LIST)]


class ImageEditRequest(ImageEditFields):
    """POST /v1/images/edits as JSON."""

    image: References | None = Field(None, description="the picture, or several")
    images: References | None = Field(None, description="the same")
    mask: Reference | None = Field(None, description="where to change the first picture")


class ImageVariationFields(ImageFields):
    """POST /v1/images/variations, without the picture."""

    strength: float | None = Field(None, description="0 to 1: how far the picture is changed")
    stream: Literal[False] | None = None


class GeneratedImage(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    seed: int | None = Field(None, description="gives this picture again, with n = 1; null: no single seed made it")
    size: str = Field(description="WIDTHxHEIGHT, as decoded")
    output_format: ImageFormat


class ImagesResponse(BaseModel):
    created: int = Field(description="seconds since 1970")
    data: list[GeneratedImage]
    output_format: ImageFormat
    size: str = Field(description="of the first picture")
    seed: int | None = Field(None, description="of the first picture")
    expires_at: int | None = Field(None, description="seconds since 1970, of the pictures' URLs")
    profile: RequestProfile | None = Field(None, description="if it was asked for")


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter"""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(description="in a folder of --allowed-lora-path, from there or absolute")


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter"""

    lora_name: str


class AdapterResponse(BaseModel):
    lora_name: str
    status: Literal["loaded", "unloaded"]


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


class StartProfileRequest(Body):
    """POST /start_profile"""

    profile_prefix: str | None = Field(default=None, description="what the names of the traces' files begin with")


class ProfileStarted(BaseModel):
    status: Literal["started"] = "started"


class ProfileStopped(BaseModel):
    status: Literal["stopped"] = "stopped"
    files: list[str] = Field(description="traces, one for each process, where the model runs")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    error: ErrorDetail

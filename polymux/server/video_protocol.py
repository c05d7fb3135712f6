"""The bodies of requests for videos and of their answers, in OpenAI's words where it has some."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from polymux.media.video_track import VideoFormat
from polymux.server.profile_answer import RequestProfile
from polymux.server.protocol import Adapters, Body, Reference, References, Size
from polymux.server.video_store import Order, Status
from polymux.validation import MAX_INTERPOLATION_EXP

_NUMBER = re.compile(r"[0-9]{1,32}(\.[0-9]{0,32})?(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
VIDEO_ID = re.compile(r"video_[0-9a-f]{32}")


def _seconds(value: object) -> float:
    readable = isinstance(value, (int, float)) and not isinstance(value, bool)
    readable = readable or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)
    try:
        seconds = float(value) if readable else -1.0  # type: ignore[arg-type]
    except OverflowError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise PydanticCustomError("size", 'must be seconds above 0, such as "4" or 2.5')
    return seconds


Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "string", "examples": ["4"]}, {"type": "number", "exclusiveMinimum": 0}]}),
]


class VideoFields(Body):
    """What a form and a JSON body have in common. null counts as not given."""

    prompt: str | None = Field(None, description="required, unless the model works without one")
    model: str | None = None
    seconds: Seconds | None = Field(None, description="of the video; with fps it gives num_frames")
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto; left out: the model's own")
    fps: float | None = Field(None, description="frames per second; left out: the model's own")
    num_frames: int | None = Field(None, description="in place of seconds")
    seed: int | None = Field(None, ge=0, lt=2**64, description="left out: drawn, and told in the answer")
    output_format: VideoFormat | None = Field(None, description="default mp4; gif and webp hold no sound")
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = Field(None, description="of the low-noise denoiser, where there are two")
    true_cfg_scale: float | None = None
    strength: float | None = Field(None, description="0 to 1: how far an input is changed")
    negative_prompt: str | None = None
    sigmas: tuple[float, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    max_sequence_length: int | None = Field(None, description="tokens of the prompt")
    enable_frame_interpolation: bool | None = Field(None, description="put frames between those of the model")
    frame_interpolation_exp: int | None = Field(
        None, ge=1, le=MAX_INTERPOLATION_EXP, description="default 1: n frames become (n - 1) * 2^exp + 1"
    )
    frame_interpolation_scale: float | None = Field(
        None, description="default 1: of the frames, where motion is estimated; 0.25, 0.5, 1, 2, 4"
    )
    lora: Adapters = None
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own pipeline")
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")
    profile: bool | None = Field(None, description="tell where the time went: with the job, or in the header x-profile")


class VideoRequest(VideoFields):
    """POST /v1/videos and /v1/videos/sync, as JSON"""

    input_reference: Reference | None = Field(None, description="the picture, or else the video, to start from")
    media: dict[str, References] | None = Field(None, description="further media, by the pipeline's argument")


def _video_id(value: str) -> str:
    if not VIDEO_ID.fullmatch(value):
        raise PydanticCustomError("reference", "must be the id of a video")
    return value


class VideoListQuery(Body):
    """The query of GET /v1/videos."""

    limit: int = Field(20, ge=1, le=100)
    after: Annotated[str, AfterValidator(_video_id)] | None = Field(None, description="the last id that is known")
    order: Order = "desc"


class VideoContentQuery(Body):
    """The query of GET /v1/videos/ID/content."""

    variant: Literal["video"] = Field("video", description="there are no others")


class VideoError(BaseModel):
    code: str
    message: str
    param: str | None = None


class Video(BaseModel):
    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int = Field(description="per cent; never falls")
    created_at: int = Field(description="seconds since 1970")
    completed_at: int | None = Field(None, description="when it was completed, or failed")
    expires_at: int | None = Field(None, description="when job and file will be gone")
    prompt: str | None = None
    seconds: str | None = Field(None, description="of the video; null: not known before it is made")
    size: str | None = Field(None, description="WIDTHxHEIGHT; null: not known before it is made")
    fps: float
    num_frames: int | None = None
    seed: int = Field(description="gives this video again")
    output_format: VideoFormat
    error: VideoError | None = None
    profile: RequestProfile | None = Field(None, description="of a completed job, if it was asked for")
    remixed_from_video_id: None = None


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True

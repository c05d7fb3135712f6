"""From the body of a request for a video to a prompt, sampling parameters and the file that is wanted.

Knows OpenAI's names (seconds, size, input_reference) and the engine's, and what pipelines call their media arguments,
through the capabilities of the loaded one; knows no particular pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from polymux.errors import InvalidRequestError
from polymux.media.video import check_fps, frames_for
from polymux.media.video_track import VideoFormat
from polymux.prompts import OmniPrompt
from polymux.request import Capabilities, OmniDiffusionSamplingParams
from polymux.server.body import parse
from polymux.server.forms import is_form, parse_form
from polymux.server.media_inputs import load, not_taken
from polymux.server.seed import seed_of
from polymux.server.state import ServerState
from polymux.server.video_protocol import VideoFields, VideoRequest
from polymux.server.video_wish import VideoWish, Words
from polymux.spelling import shown
from polymux.validation import INTERPOLATION

# The pipeline's arguments that `input_reference` may mean: the first that there is.
REFERENCES = (
    "image",
    "images",
    "reference_images",
    "input_images",
    "image_reference",
    "conditioning_image",
    "control_image",
    "video",
)

Media = Mapping[str, list[str | bytes]]  # uploads and URLs, by the field that they came in


async def read(state: ServerState, request: Request) -> VideoWish:
    """The request's body. Raises what is wrong with it, and NotReadyError."""
    capabilities = await state.model_of("video")
    body, sent = await _read(request, capabilities)
    state.note(request, body.model, body.user)
    return await _wish(state, body, sent, capabilities)


async def _read(request: Request, capabilities: Capabilities) -> tuple[VideoFields, Media]:
    if is_form(request):
        media = {*capabilities.media, *(capabilities.refused.keys() - VideoFields.model_fields.keys())}
        names = {"input_reference", "input_reference[image_url]", *media}
        fields, found = await parse_form(request, VideoFields, names)
        return fields, {name.removesuffix("[image_url]"): items for name, items in found.items() if items}
    body = await parse(request, VideoRequest, or_form=True)
    sent: dict[str, list[str | bytes]] = {f"media.{name}": [*sources] for name, sources in (body.media or {}).items()}
    if body.input_reference is not None:
        sent["input_reference"] = [body.input_reference]
    return body, sent


async def _wish(state: ServerState, body: VideoFields, sent: Media, capabilities: Capabilities) -> VideoWish:
    format = body.output_format or "mp4"
    fps = _fps(body, format, capabilities)
    frames = _frames(body, fps, capabilities)
    width, height = (None, None) if body.size in (None, "auto") else map(int, body.size.split("x"))
    arguments: dict[str, str] = {}
    for name in sent:
        argument = _argument(name, capabilities)
        if argument in arguments:
            raise InvalidRequestError(f"{name}: the same as {arguments[argument]}", param=name)
        arguments[argument] = name
    loaded = {name: await load(state, field, name, sent[field], capabilities) for name, field in arguments.items()}
    seed = seed_of(body.seed, capabilities)
    prompt: OmniPrompt = {"multi_modal_data": {**loaded}}
    if body.prompt is not None:
        prompt["prompt"] = body.prompt
    defaults = capabilities.defaults
    between = _interpolation(body)
    params = OmniDiffusionSamplingParams(
        width=width,
        height=height,
        num_frames=frames,
        fps=body.fps if "fps" in capabilities.arguments else None,
        seed=seed,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        guidance_scale_2=body.guidance_scale_2,
        true_cfg_scale=body.true_cfg_scale,
        strength=body.strength,
        negative_prompt=body.negative_prompt,
        sigmas=body.sigmas,
        timesteps=body.timesteps,
        max_sequence_length=body.max_sequence_length,
        lora=state.adapters.chosen(body.lora or ()),
        profile=bool(body.profile),
        extra_args=body.extra_args or {},
        **between,
    )
    count = frames or defaults.get("num_frames")
    return VideoWish(
        prompt=prompt,
        params=params,
        fps=_file_fps(fps, params, format),
        format=format,
        seed=seed,
        words=Words(body, arguments),
        width=width or defaults.get("width"),
        height=height or defaults.get("height"),
        num_frames=None if count is None else (count - 1) * params.frame_factor + 1,
    )


def _fps(body: VideoFields, format: VideoFormat, capabilities: Capabilities) -> float:
    """Of the file; a pipeline that takes a rate is told too."""
    fps = body.fps if body.fps is not None else capabilities.fps
    if fps is None:
        raise InvalidRequestError("fps is missing: how many the model is made for is not known", param="fps")
    try:
        check_fps(fps, format)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="fps") from None
    return float(fps)


def _interpolation(body: VideoFields) -> dict[str, Any]:
    """What the body says about frames between frames, by the names that are the engine's, too."""
    return {name: value for name in INTERPOLATION if (value := getattr(body, name)) is not None}


def _file_fps(fps: float, params: OmniDiffusionSamplingParams, format: VideoFormat) -> float:
    """With the frames that are put between."""
    made = fps * params.frame_factor
    try:
        check_fps(made, format)
    except ValueError as error:
        what = f"frame_interpolation_exp={params.frame_interpolation_exp}: {error}"
        raise InvalidRequestError(what, param="frame_interpolation_exp") from None
    return made


def _frames(body: VideoFields, fps: float, capabilities: Capabilities) -> int | None:
    if body.seconds is None:
        return body.num_frames
    if body.num_frames is not None:
        what = f"num_frames={body.num_frames}: cannot be combined with seconds; the rate of the file is fps"
        raise InvalidRequestError(what, param="num_frames")
    if "num_frames" not in capabilities.arguments:
        raise InvalidRequestError(
            f"seconds={shown(body.seconds)}: the model's videos have a fixed length", param="seconds"
        )
    return frames_for(body.seconds, fps, capabilities.frames_multiple)


def _argument(field: str, capabilities: Capabilities) -> str:
    """The pipeline's argument that a field of the request means. Raises InvalidRequestError."""
    name = field.removeprefix("media.")
    names = REFERENCES if name == "input_reference" else (name,)
    found = next((name for name in names if name in capabilities.media), None)
    if found is None:
        raise not_taken(field, name, capabilities)
    return found

"""Checks a request against what the loaded model takes and what the operator allows, before any work is done.

Pure functions over the nouns. A request that passes can be encoded for the wire, decoded on the other side, and names
only arguments that the pipeline takes. What only the pipeline itself can know (a size that no scheduler likes, the
default of a size that is not given) is not checked here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from polymux.config import LimitsConfig
from polymux.conversation import check_conversation
from polymux.errors import InvalidRequestError
from polymux.further_arguments import check_further
from polymux.request import (
    CHANNELS,
    ITEM_BYTES,
    ArrayData,
    Capabilities,
    ImageData,
    LoRARequest,
    OmniDiffusionSamplingParams,
    Request,
)
from polymux.sampling import check_heard, check_reference, check_sampling, sampling_of
from polymux.spelling import shown

SEEDS = 2**64  # torch takes seeds below this
MAX_PARTIAL_IMAGES = 3  # per output, as in OpenAI's API
MAX_NESTING = 16
MAX_LORAS = 8  # of one request
MAX_LORA_SCALE = 100
MAX_NAME = 100  # characters of a name in a message
MAX_INTERPOLATION_EXP = 4  # 16 frames for one
INTERPOLATION_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
MAX_SCALE = 1000  # far beyond what makes sense, and far below what overflows in half precision

# Answered by the engine, so no pipeline needs to take them. All other fields are arguments of the pipeline.
INTERPOLATION = ("enable_frame_interpolation", "frame_interpolation_exp", "frame_interpolation_scale")
_ENGINE_FIELDS = {
    *("lora", "seed", "generator", "num_outputs_per_prompt", "output_type", "profile", "extra_args"),
    *INTERPOLATION,
}
ARGUMENT_FIELDS = tuple(f.name for f in dataclasses.fields(OmniDiffusionSamplingParams) if f.name not in _ENGINE_FIELDS)
_FINITE = ("guidance_scale", "guidance_scale_2", "true_cfg_scale")


def validate(request: Request, capabilities: Capabilities, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError with the field, its value and what is allowed."""
    capabilities = capabilities.asked_by(request)
    _check_texts(request, limits)
    if capabilities.chats:
        check_conversation(request, capabilities, limits)
        _check_media(request, capabilities)
        check_sampling(sampling_of(request, capabilities), capabilities, limits)
        return
    if capabilities.transcribes:
        check_sampling(sampling_of(request, capabilities), capabilities, limits)
        check_heard(request, capabilities, limits)
        return
    for name, asked in (("messages", request.messages), ("modalities", request.modalities)):
        if asked:
            why = f"{capabilities.pipeline} does not answer conversations, it makes {capabilities.modality}"
            raise InvalidRequestError(f"{name}: {why}", param=name)
    if capabilities.samples:
        if request.prompt is None or not request.prompt.strip():
            raise InvalidRequestError("prompt is empty", param="prompt")
        sampling = sampling_of(request, capabilities)
        check_sampling(sampling, capabilities, limits)
        check_reference(request, sampling, capabilities, limits)
        return
    if request.sampling is not None:
        what = f"{capabilities.pipeline} takes OmniDiffusionSamplingParams, not SamplingParams"
        raise InvalidRequestError(f"sampling_params: {what}", param="sampling_params")
    params = request.params
    _check_extra_args(params.extra_args, capabilities)
    _check_names(request, capabilities)
    if capabilities.extra:
        check_further(params.extra_args, capabilities)
    check_size(params, capabilities, limits)
    _check_frames(params, capabilities, limits)
    _check_interpolation(params, capabilities, limits)
    _check_seconds(params, capabilities, limits)
    _check_counts(params, capabilities, limits)
    _check_scales(params)
    _check_lora(params, capabilities)
    _check_schedule(params, limits)
    _check_randomness(request)
    _check_media(request, capabilities)
    _check_marks(request, capabilities)
    _check_previews(request, capabilities)


def given_arguments(request: Request) -> dict[str, Any]:
    """Every argument of the pipeline that the request sets, by name, its media included."""
    given = {name: getattr(request.params, name) for name in ARGUMENT_FIELDS}
    given["prompt"] = request.prompt
    given["negative_prompt"] = negative_prompt(request)
    given = {name: value for name, value in given.items() if value is not None}
    return given | request.media | request.params.extra_args


def negative_prompt(request: Request) -> str | None:
    """The request's own negative prompt, or else the one of its parameters."""
    return request.params.negative_prompt if request.negative_prompt is None else request.negative_prompt


def refuse(name: str, value: Any, why: str) -> InvalidRequestError:
    """The error for a field that has the wrong value. Long values are cut, and so are names that clients make up."""
    name = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
    return InvalidRequestError(f"{name}={shown(value)}: {why}", param=name)


def _check_texts(request: Request, limits: LimitsConfig) -> None:
    if not isinstance(request.request_id, str) or not request.request_id or not _encodable(request.request_id):
        raise refuse("request_id", request.request_id, "must be a string that is not empty")
    texts = [
        ("prompt", request.prompt),
        ("negative_prompt", request.negative_prompt),
        ("negative_prompt", request.params.negative_prompt),
    ]
    for name, text in texts:
        if text is None:
            continue
        if not isinstance(text, str):
            raise refuse(name, text, "must be a string")
        if len(text) > limits.max_prompt_length:
            allowed = f"allowed are {limits.max_prompt_length} (--max-prompt-length)"
            raise InvalidRequestError(f"{name} has {len(text)} characters: {allowed}", param=name)
        if not _encodable(text):
            raise InvalidRequestError(f"{name} is not valid Unicode: it holds a lone surrogate", param=name)


def _check_names(request: Request, capabilities: Capabilities) -> None:
    given = given_arguments(request)
    takes = {*capabilities.arguments, *capabilities.media}
    for name, value in given.items():
        if name in capabilities.refused and not _asks_for_nothing(name, value):
            raise _refuse_argument(request, name, value, capabilities.refused[name])
        if name not in takes:
            honoured = sorted(takes - capabilities.refused.keys() - _ENGINE_FIELDS)
            why = f"{capabilities.pipeline} does not take it; it takes {', '.join(honoured)}"
            raise _refuse_argument(request, name, value, why)
    if request.params.output_type == "latent" and "output_type" not in capabilities.arguments:
        raise refuse("output_type", "latent", f"{capabilities.pipeline} cannot return latents; allowed are pil, np")
    for name in capabilities.required:
        if name not in given:
            raise InvalidRequestError(f"{name} is missing: {capabilities.pipeline} needs it", param=name)


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether that is what happens anyway: a scale of zero, and a guidance scale of one."""
    return bool(value == 0 or (name in _FINITE and value == 1))


def _refuse_argument(request: Request, name: str, value: Any, why: str) -> InvalidRequestError:
    if name in request.media or name in ("prompt", "negative_prompt"):
        return InvalidRequestError(f"{name}: {why}", param=name)  # pixels and texts have no place in a message
    return refuse(name, value, why)


def check_size(params: OmniDiffusionSamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError unless the model makes pictures of this height and width, if they are given."""
    pixels, multiple = limits.max_generated_image_size, capabilities.size_multiple
    for name, value in (("height", params.height), ("width", params.width)):
        if value is None:
            continue
        _check_integer(name, value, 1, pixels)
        if capabilities.fixed_size and value != (own := capabilities.defaults[name]):
            raise refuse(name, value, f"{capabilities.pipeline} makes pictures of one size, and this must be {own}")
        if value % multiple:
            near = [n for n in (value - value % multiple, value - value % multiple + multiple) if n > 0]
            raise refuse(name, value, f"must be a multiple of {multiple}, such as {' or '.join(map(str, near))}")
    if params.height and params.width and params.height * params.width > pixels:
        size = f"{params.width}x{params.height} has {params.width * params.height} pixels"
        raise InvalidRequestError(f"{size}: allowed are {pixels} (--max-generated-image-size)", param="size")


def _check_frames(params: OmniDiffusionSamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    if params.num_frames is not None:
        _check_integer("num_frames", params.num_frames, 1, limits.max_num_frames, "--max-num-frames")
        over = (params.num_frames - 1) % capabilities.frames_multiple
        if over:
            near = params.num_frames - over
            why = f"must be 1 more than a multiple of {capabilities.frames_multiple}, such as {near}"
            raise refuse("num_frames", params.num_frames, f"{why} or {near + capabilities.frames_multiple}")
    if params.fps is not None and (not _is_finite(params.fps) or params.fps <= 0):
        raise refuse("fps", params.fps, "must be a finite number above 0")
    if params.fps is not None and capabilities.modality == "video" and capabilities.sample_rate is not None:
        frames = params.num_frames or capabilities.defaults.get("num_frames", limits.max_num_frames)
        if frames / params.fps > limits.max_audio_seconds:
            allowed = f"allowed are {limits.max_audio_seconds:g} seconds with sound (--max-audio-seconds)"
            raise refuse("fps", params.fps, f"{frames} frames last {frames / params.fps:g} seconds: {allowed}")


def _check_interpolation(params: OmniDiffusionSamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    switch, exp, scale = INTERPOLATION
    if type(params.enable_frame_interpolation) is not bool:
        raise refuse(switch, params.enable_frame_interpolation, "must be true or false")
    _check_integer(exp, params.frame_interpolation_exp, 1, MAX_INTERPOLATION_EXP)
    if not _is_finite(params.frame_interpolation_scale) or params.frame_interpolation_scale not in INTERPOLATION_SCALES:
        raise refuse(
            scale, params.frame_interpolation_scale, f"allowed are {', '.join(map(str, INTERPOLATION_SCALES))}"
        )
    if not params.enable_frame_interpolation:
        for name, value, plain in (
            (exp, params.frame_interpolation_exp, 1),
            (scale, params.frame_interpolation_scale, 1),
        ):
            if value != plain:
                raise refuse(name, value, f"acts only with {switch}")
        return
    if capabilities.modality != "video":
        raise refuse(switch, True, f"{capabilities.pipeline} makes {capabilities.modality}, not video")
    if not capabilities.frame_interpolation:
        raise refuse(switch, True, "there is no network for it; --frame-interpolation-model-path names one")
    if params.output_type == "latent":
        raise refuse(switch, True, "cannot be combined with output_type='latent'")
    made = params.num_frames or capabilities.defaults.get("num_frames", 1)
    frames = (made - 1) * params.frame_factor + 1
    if frames > limits.max_num_frames:
        what = f"makes {frames} frames of {made}, allowed are {limits.max_num_frames} (--max-num-frames)"
        raise refuse(exp, params.frame_interpolation_exp, what)


def _check_seconds(params: OmniDiffusionSamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    if params.seconds is None:
        return
    if not _is_finite(params.seconds) or params.seconds <= 0:
        raise refuse("seconds", params.seconds, "must be a finite number above 0")
    rate = capabilities.sample_rate
    if rate is not None and params.seconds * rate < 1:
        raise refuse("seconds", params.seconds, f"must last for a sample, of which there are {rate} per second")
    if params.seconds > limits.max_audio_seconds:
        raise refuse("seconds", params.seconds, f"allowed are {limits.max_audio_seconds:g} (--max-audio-seconds)")
    if capabilities.max_seconds is not None and params.seconds > capabilities.max_seconds:
        raise refuse("seconds", params.seconds, f"{capabilities.pipeline} makes at most {capabilities.max_seconds:g}")


def _check_counts(params: OmniDiffusionSamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    _check_integer(
        "num_outputs_per_prompt", params.num_outputs_per_prompt, 1, limits.max_num_outputs, "--max-num-outputs"
    )
    if params.num_inference_steps is not None:
        steps = params.num_inference_steps
        low = capabilities.min_inference_steps
        _check_integer("num_inference_steps", steps, low, limits.max_inference_steps, "--max-inference-steps")
    if params.max_sequence_length is not None:
        length = params.max_sequence_length
        _check_integer("max_sequence_length", length, 1, limits.max_prompt_length, "--max-prompt-length")
    if params.output_type not in ("pil", "np", "latent"):
        raise refuse("output_type", params.output_type, "allowed are pil, np, latent")
    if type(params.profile) is not bool:
        raise refuse("profile", params.profile, "must be true or false")


def _check_scales(params: OmniDiffusionSamplingParams) -> None:
    for name in _FINITE:
        value = getattr(params, name)
        if value is not None and not (_is_finite(value) and abs(value) <= MAX_SCALE):
            raise refuse(name, value, f"must be a number from -{MAX_SCALE} to {MAX_SCALE}")
    if params.strength is not None and not (_is_finite(params.strength) and 0 <= params.strength <= 1):
        raise refuse("strength", params.strength, "must be a number from 0 to 1")


def _check_lora(params: OmniDiffusionSamplingParams, capabilities: Capabilities) -> None:
    if not isinstance(params.lora, (tuple, list)) or not all(isinstance(one, LoRARequest) for one in params.lora):
        raise refuse("lora", params.lora, "must be a list of LoRARequest")
    if params.lora and not capabilities.lora:
        raise InvalidRequestError(f"lora: {capabilities.pipeline} takes no LoRA", param="lora")
    if len(params.lora) > MAX_LORAS:
        raise InvalidRequestError(f"lora: {len(params.lora)} given, allowed are {MAX_LORAS}", param="lora")
    for one in params.lora:
        if not isinstance(one.path, str) or not one.path or not _encodable(one.path):
            raise refuse("lora.path", one.path, "must be a path")
        if not _is_finite(one.scale) or abs(one.scale) > MAX_LORA_SCALE:
            raise refuse("lora.scale", one.scale, f"must be a number from -{MAX_LORA_SCALE} to {MAX_LORA_SCALE}")
        if one.component is not None and not isinstance(one.component, str):
            raise refuse("lora.component", one.component, "must be the name of a denoiser")


def _check_schedule(params: OmniDiffusionSamplingParams, limits: LimitsConfig) -> None:
    if params.sigmas is not None and params.timesteps is not None:
        raise refuse("timesteps", params.timesteps, "cannot be combined with sigmas")
    for name, values in (("sigmas", params.sigmas), ("timesteps", params.timesteps)):
        if values is None:
            continue
        if not isinstance(values, (tuple, list)) or not all(_is_finite(v) and v >= 0 for v in values):
            raise refuse(name, values, "must be a list of finite numbers, none below 0")
        if not 1 <= len(values) <= limits.max_inference_steps:
            allowed = f"allowed are 1 to {limits.max_inference_steps} (--max-inference-steps)"
            raise InvalidRequestError(f"{name} has {len(values)} entries: {allowed}", param=name)
        if params.num_inference_steps not in (None, len(values)):
            raise refuse("num_inference_steps", params.num_inference_steps, f"{name} has {len(values)} entries")


def _check_randomness(request: Request) -> None:
    params = request.params
    if params.generator is not None:
        raise InvalidRequestError("generator: its state travels as the request's generator_state", param="generator")
    if params.seed is None:
        return
    _check_integer("seed", params.seed, 0, SEEDS - params.num_outputs_per_prompt)
    if request.generator_state is not None:
        raise refuse("seed", params.seed, "cannot be combined with generator")


def _check_media(request: Request, capabilities: Capabilities) -> None:
    for name, items in request.media.items():
        most = capabilities.media.get(name, 0)
        if not isinstance(items, list) or not 1 <= len(items) <= most:
            count = len(items) if isinstance(items, list) else type(items).__name__
            raise InvalidRequestError(f"{name}: {count} given, allowed are 1 to {most}", param=name)
        for item in items:
            if not _consistent(item):
                raise InvalidRequestError(f"{name}: its bytes do not fit its type and shape", param=name)


def _check_previews(request: Request, capabilities: Capabilities) -> None:
    _check_integer("partial_images", request.partial_images, 0, MAX_PARTIAL_IMAGES)
    if request.partial_images and not capabilities.previews:
        why = capabilities.refused.get("partial_images", f"{capabilities.pipeline} makes no previews")
        raise refuse("partial_images", request.partial_images, f"must be 0: {why}")


def _check_marks(request: Request, capabilities: Capabilities) -> None:
    """Where a prompt must name its pictures, it names exactly those that there are."""
    if capabilities.picture_mark is None or request.prompt is None:
        return
    pictures = sum(len(items) for items in request.media.values())
    marks = [capabilities.picture_mark.format(i + 1) for i in range(pictures + 1)]
    for i, mark in enumerate(marks):
        if (mark in request.prompt) != (i < pictures):
            what = f"there is no picture {i + 1}" if i == pictures else f"it does not say where picture {i + 1} belongs"
            raise InvalidRequestError(f"prompt: {what}: {mark}", param="prompt")


def _check_extra_args(extra: dict[str, Any], capabilities: Capabilities) -> None:
    if not isinstance(extra, dict) or not all(isinstance(key, str) and _encodable(key) for key in extra):
        raise refuse("extra_args", extra, "must be a dict with argument names as keys")
    for name, value in extra.items():
        if not is_extra(name):
            raise refuse(f"extra_args.{name}", value, f"use the field {name}")
        if name in capabilities.media:
            raise InvalidRequestError(f"extra_args.{name}: give it as media", param=f"extra_args.{name}")
        if not _plain(value):
            allowed = "allowed are None, booleans, integers, finite numbers, strings, and lists and dicts of these"
            raise refuse(f"extra_args.{name}", value, allowed)


def is_extra(name: str) -> bool:
    """Whether an argument of the pipeline is one for `extra_args`, and has no field of its own."""
    return name not in ARGUMENT_FIELDS and name not in _ENGINE_FIELDS and name != "prompt"


def _check_integer(name: str, value: Any, low: int, high: int, flag: str = "") -> None:
    if type(value) is not int:  # bool is a subclass of int, and not a count
        raise refuse(name, value, "must be an integer")
    if not low <= value <= high:
        raise refuse(name, value, f"must be from {low} to {high}" + (f" ({flag})" if flag else ""))


def _is_finite(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is float and math.isfinite(value)


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether a value arrives on the other side as it is."""
    if depth > MAX_NESTING:
        return False
    if type(value) in (list, tuple):
        return all(_plain(item, depth + 1) for item in value)
    if type(value) is dict:
        return all(type(k) is str and _encodable(k) and _plain(v, depth + 1) for k, v in value.items())
    if type(value) is str:
        return _encodable(value)
    return value is None or type(value) is bool or _is_finite(value)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _consistent(item: Any) -> bool:
    if isinstance(item, ImageData):
        channels = CHANNELS.get(item.mode, 0)
        return item.width > 0 < item.height and len(item.data) == item.width * item.height * channels > 0
    if isinstance(item, ArrayData):
        size = ITEM_BYTES.get(item.dtype, 0) * math.prod(item.shape)
        return all(n >= 0 for n in item.shape) and len(item.data) == size > 0
    return False

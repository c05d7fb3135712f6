"""Checks a request with `SamplingParams` against what the loaded model takes and what the operator allows.

The counterpart of `polymux.validation`, which is for diffusion and calls this one. What only the model's tokenizer can
know (a text that it has no signs for) is not checked here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.further_arguments import COLDEST, check_further
from polymux.json_schema import check_schema
from polymux.request import (
    ITEM_BYTES,
    ArrayData,
    Capabilities,
    OmniDiffusionSamplingParams,
    Request,
    SamplingParams,
)
from polymux.spelling import shown

SEEDS = 2**64
_MOST_SHOWN = 20  # names in a message
SPEEDS = (0.25, 4.0)
MAX_RATE = 768_000  # samples per second of a sound that comes with a request
REFERENCE = "ref_audio"  # the medium that a request to speak may have
HEARD = "audio"  # the medium of a request to write down what is said
# Answered by the engine for every model, or not a field on the wire.
_ENGINE_FIELDS = {"seed", "profile", "extra_args", REFERENCE}
FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _ENGINE_FIELDS)
_RANGES: dict[str, tuple[float, float]] = {
    "speed": SPEEDS,
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "guidance_scale": (0, 100),
}
_SHARED = {f.name for f in dataclasses.fields(SamplingParams)}
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
_SAMPLING = ("top_k", "top_p", "min_p", "temperature")  # they act only where tokens are drawn


def sampling_of(request: Request, capabilities: Capabilities) -> SamplingParams:
    """The request's parameters; of those of diffusion, what they have in common. Raises InvalidRequestError for others,
    and for what no model that takes SamplingParams takes."""
    default = OmniDiffusionSamplingParams()
    given = {
        f.name: value
        for f in dataclasses.fields(default)
        if (value := getattr(request.params, f.name)) != getattr(default, f.name)
    }
    if request.negative_prompt is not None:
        given["negative_prompt"] = request.negative_prompt
    if request.partial_images:
        given["partial_images"] = request.partial_images
    unknown = [name for name in request.media if name not in capabilities.media]
    for name in [*unknown, *(name for name in given if name not in _SHARED)]:
        why = capabilities.refused.get(name, f"{capabilities.pipeline} does not take it")
        raise InvalidRequestError(f"{name}: {why}", param=name)
    return _spelled(request.sampling or SamplingParams(**given), capabilities)


def _spelled(params: SamplingParams, capabilities: Capabilities) -> SamplingParams:
    """With the names of a voice and a language as the model spells them, which nobody must know exactly."""
    voice, language = _alike(params.voice, capabilities.voices), _alike(params.language, capabilities.languages)
    if (voice, language) == (params.voice, params.language):
        return params
    return dataclasses.replace(params, voice=voice, language=language)


def _alike(given: Any, known: tuple[str, ...]) -> Any:
    """The only known name that differs at most in the case of its letters; else what was given."""
    if not isinstance(given, str) or given in known:
        return given
    alike = [name for name in known if name.casefold() == given.casefold()]
    return alike[0] if len(alike) == 1 else given


def check_reference(request: Request, params: SamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError unless the recording of a voice, and what is said of it, are complete and fit."""
    given = request.media.get(REFERENCE)
    if given is None:
        if params.ref_text is not None and "ref_text" in capabilities.arguments:
            raise InvalidRequestError("ref_text: acts only with ref_audio", param="ref_text")
        return
    if len(given) != 1 or not _is_sound(given[0]):
        what = "must be one sound of one channel or two, with its samples per second"
        raise InvalidRequestError(f"{REFERENCE}: {what}", param=REFERENCE)
    (sound,) = given
    assert isinstance(sound, ArrayData) and sound.sample_rate is not None
    seconds = sound.shape[1] / sound.sample_rate
    if seconds > limits.max_ref_audio_seconds:
        allowed = f"allowed are {limits.max_ref_audio_seconds:g} (--max-ref-audio-seconds)"
        raise InvalidRequestError(f"{REFERENCE}: {seconds:.2f} s: {allowed}", param=REFERENCE)
    if params.ref_text is None and "ref_text" in capabilities.arguments:
        why = f"{capabilities.pipeline} must know what is said in {REFERENCE}"
        raise InvalidRequestError(f"ref_text is missing: {why}", param="ref_text")


def check_heard(request: Request, capabilities: Capabilities, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError unless there is one sound to listen to."""
    given = request.media.get(HEARD, [])
    if not given:
        raise InvalidRequestError(f"{HEARD} is missing: {capabilities.pipeline} needs it", param=HEARD)
    if len(given) != 1 or not _is_sound(given[0]):
        what = "must be one sound of one channel or two, with its samples per second"
        raise InvalidRequestError(f"{HEARD}: {what}", param=HEARD)
    (sound,) = given
    assert isinstance(sound, ArrayData) and sound.sample_rate is not None
    seconds = sound.shape[1] / sound.sample_rate
    if seconds > limits.max_input_audio_seconds:
        allowed = f"allowed are {limits.max_input_audio_seconds:g} (--max-input-audio-seconds)"
        raise InvalidRequestError(f"{HEARD}: {seconds:.2f} s: {allowed}", param=HEARD)


def _is_sound(item: Any) -> bool:
    if not isinstance(item, ArrayData) or item.dtype not in ("float32", "float64", "int16"):
        return False
    if type(item.sample_rate) is not int or not 1 <= item.sample_rate <= MAX_RATE:
        return False
    size = ITEM_BYTES[item.dtype] * math.prod(item.shape)
    return len(item.shape) == 2 and item.shape[0] in (1, 2) and len(item.data) == size > 0


def check_sampling(params: SamplingParams, capabilities: Capabilities, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError with the field, its value and what is allowed."""
    for name in FIELDS:
        value = getattr(params, name)
        if value is not None and name not in capabilities.arguments:
            own = f"{capabilities.pipeline} does not take it; it takes {_names(capabilities)}"
            raise _refuse(name, value, capabilities.refused.get(name, own))
    if type(params.profile) is not bool:
        raise _refuse("profile", params.profile, "must be true or false")
    if params.profile and "profile" in capabilities.refused:
        raise _refuse("profile", True, capabilities.refused["profile"])
    for name, chosen, known in (
        ("voice", params.voice, capabilities.voices),
        ("language", params.language, capabilities.languages),
    ):
        if chosen is not None and chosen not in known:
            raise _refuse(name, chosen, f"allowed are {_shown(known)}")
    for name in ("instructions", "ref_text"):
        _check_text(name, getattr(params, name), limits)
    _check_embedding(params, capabilities.embedding_size)
    for name, (low, high) in _RANGES.items():
        _check_number(name, getattr(params, name), low, high)
    if params.temperature is not None and 0 < params.temperature < COLDEST:
        raise _refuse("temperature", params.temperature, f"must be 0, or a number from {COLDEST:g} to 100")
    _check_seconds(params, limits)
    _check_integer("top_k", params.top_k, 1, 10**6)
    _check_integer("max_new_tokens", params.max_new_tokens, 1, capabilities.max_new_tokens or 2**31)
    _check_integer("seed", params.seed, 0, SEEDS - 1)
    _check_stop(params.stop)
    if params.json_schema is not None:
        check_schema(params.json_schema, "json_schema")
    _check_drawing(params)
    check_further(params.extra_args, capabilities)


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if (more := len(names) - _MOST_SHOWN) > 0 else "")


def _names(capabilities: Capabilities) -> str:
    deaf = set() if REFERENCE in capabilities.media else {REFERENCE}
    return ", ".join(sorted({*capabilities.arguments, *_ENGINE_FIELDS} - {*capabilities.extra, "prompt", *deaf}))


_TOLD = ("do_sample", *_SAMPLING, "repetition_penalty", "guidance_scale", "max_new_tokens")  # to a model's `generate`


def generation_arguments(params: SamplingParams) -> dict[str, Any]:
    """What a model's `generate` is told. To name how tokens are drawn is to ask that they are."""
    given = {name: value for name in _TOLD if (value := getattr(params, name)) is not None}
    if params.temperature == 0:
        del given["temperature"]
        return given | {"do_sample": False}
    if any(name in given for name in _SAMPLING):
        given.setdefault("do_sample", True)
    return given


def _check_seconds(params: SamplingParams, limits: LimitsConfig) -> None:
    if params.seconds is None:
        return
    if params.max_new_tokens is not None:
        raise _refuse("seconds", params.seconds, "cannot be combined with max_new_tokens")
    if not _is_number(params.seconds) or params.seconds <= 0:
        raise _refuse("seconds", params.seconds, "must be a number above 0")
    if params.seconds > limits.max_audio_seconds:
        raise _refuse("seconds", params.seconds, f"allowed are {limits.max_audio_seconds:g} (--max-audio-seconds)")


def _check_stop(stop: Any) -> None:
    if stop is None:
        return
    if not isinstance(stop, (tuple, list)) or not all(_is_text(text) and text for text in stop):
        raise _refuse("stop", stop, "must be a list of texts, none of them empty")
    if len(stop) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stop):
        raise _refuse("stop", stop, f"allowed are {MAX_STOPS} texts of {MAX_STOP_LENGTH} characters")


def _check_drawing(params: SamplingParams) -> None:
    if params.do_sample is not None and type(params.do_sample) is not bool:
        raise _refuse("do_sample", params.do_sample, "must be true or false")
    idle = [
        n for n in _SAMPLING if getattr(params, n) is not None and not (n == "temperature" and not params.temperature)
    ]
    if idle and (params.do_sample is False or params.temperature == 0):
        raise _refuse(idle[0], getattr(params, idle[0]), "has no effect without sampling")
    if params.do_sample and params.temperature == 0:
        raise _refuse("temperature", 0, "cannot be combined with do_sample")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if value is not None and not (_is_number(value) and low <= value <= high):
        raise _refuse(name, value, f"must be a number from {low:g} to {high:g}")


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise _refuse(name, value, f"must be an integer from {low} to {high}")


def _check_text(name: str, value: Any, limits: LimitsConfig) -> None:
    if value is None:
        return
    if not _is_text(value):
        raise _refuse(name, value, "must be a string of valid Unicode")
    if len(value) > limits.max_prompt_length:
        allowed = f"allowed are {limits.max_prompt_length} (--max-prompt-length)"
        raise InvalidRequestError(f"{name} has {len(value)} characters: {allowed}", param=name)
    if name == "ref_text" and not value.strip():
        raise _refuse(name, value, "is empty")


def _check_embedding(params: SamplingParams, size: int | None) -> None:
    name, values = "speaker_embedding", params.speaker_embedding
    if values is None:
        return
    if not isinstance(values, (tuple, list)) or not all(_is_number(value) for value in values):
        raise _refuse(name, values, "must be a list of finite numbers")
    if len(values) != size:
        what = "the model has no vectors for its voices" if size is None else f"the model's voices have {size}"
        raise InvalidRequestError(f"{name} has {len(values)} values: {what}", param=name)
    if params.voice is not None:
        raise InvalidRequestError(f"{name}: cannot be combined with voice", param=name)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63  # false for NaN


def _refuse(name: str, value: Any, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={shown(value)}: {why}", param=name)

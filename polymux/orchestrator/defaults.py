"""The operator's defaults of sampling parameters: what requests get that do not say otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from polymux.config import LimitsConfig
from polymux.errors import ConfigError, InvalidRequestError
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Request, SamplingParams
from polymux.sampling import sampling_of
from polymux.spelling import shown
from polymux.validation import validate

_ENGINE = ("seed", "extra_args", "output_type", "num_outputs_per_prompt", "lora")  # not arguments of the model's call
_TOLD = ("height", "width", "num_frames", "seed")  # what clients, and routes, are told beforehand
_DRAWN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
)  # how tokens are drawn; no default for a request that has none drawn
# Fields that exclude each other: who names one of them does not leave the others open.
_EITHER = (
    ("voice", "speaker_embedding"),
    ("seconds", "max_new_tokens"),
    ("num_inference_steps", "sigmas", "timesteps"),
)

Params = TypeVar("Params", SamplingParams, OmniDiffusionSamplingParams)


def check_defaults(defaults: Mapping[str, Any], capabilities: Capabilities | None, limits: LimitsConfig) -> None:
    """Raises ConfigError for one that the loaded model does not take: every request would be refused."""
    if capabilities is None or not defaults:
        return
    kind = SamplingParams if capabilities.samples else OmniDiffusionSamplingParams
    for name, value in defaults.items():
        taken = name in kind.__dataclass_fields__ and (name in _ENGINE or name in capabilities.arguments)
        if not taken:
            what = f"default_sampling_params.{name}={shown(value)}: {capabilities.pipeline} does not take it"
            raise ConfigError(what, param="deploy_config")
    probe = with_defaults(Request(request_id="defaults", prompt="a"), defaults, capabilities)
    try:
        validate(probe, capabilities, limits)
    except InvalidRequestError as error:
        if error.param in defaults:
            raise ConfigError(f"default_sampling_params: {error.message}", param="deploy_config") from None


def with_defaults(request: Request, defaults: Mapping[str, Any], capabilities: Capabilities) -> Request:
    """Raises InvalidRequestError for parameters that the model does not take."""
    if not defaults or capabilities.asked_by(request) is not capabilities:
        return request  # they are for what the model makes first of all
    if capabilities.samples:
        if (request.prompt or "").lstrip().startswith(capabilities.speaker_marks):  # it says itself who speaks
            defaults = {name: value for name, value in defaults.items() if name != "voice"}
        filled = _filled(sampling_of(request, capabilities), defaults)
        return msgspec.structs.replace(request, sampling=filled, params=OmniDiffusionSamplingParams())
    if request.generator_state is not None:
        defaults = {name: value for name, value in defaults.items() if name != "seed"}
    return msgspec.structs.replace(request, params=_filled(request.params, defaults))


def described(capabilities: Capabilities, defaults: Mapping[str, Any]) -> Capabilities:
    """With those defaults that are told beforehand."""
    told = {name: defaults[name] for name in _TOLD if defaults.get(name) is not None}
    return msgspec.structs.replace(capabilities, defaults=capabilities.defaults | told) if told else capabilities


def _filled(params: Params, defaults: Mapping[str, Any]) -> Params:
    said = {
        f.name
        for f in dataclasses.fields(params)
        if getattr(params, f.name) != (f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
    }
    closed = said | {name for group in _EITHER if said.intersection(group) for name in group}
    if isinstance(params, SamplingParams):
        closed |= _closed_by_drawing(params, said, defaults)
    given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in defaults.items() if n not in closed}
    if "extra_args" in defaults and isinstance(params.extra_args, dict):
        given["extra_args"] = defaults["extra_args"] | params.extra_args
    return replace(params, **given)


def _closed_by_drawing(params: SamplingParams, said: set[str], defaults: Mapping[str, Any]) -> set[str]:
    """Who wants the likeliest tokens wants none of the defaults for drawing, and the other way round."""
    if params.do_sample is False or params.temperature == 0:
        return {"do_sample", *_DRAWN}
    if params.do_sample or said.intersection(_DRAWN):
        return {"do_sample", "temperature"} if defaults.get("temperature") == 0 else {"do_sample"}
    return set()

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
from polymux.validation import validate

_ENGINE = ("seed", "extra_args", "output_type", "num_outputs_per_prompt", "lora")  # not arguments of the model's call

Params = TypeVar("Params", SamplingParams, OmniDiffusionSamplingParams)


def check_defaults(defaults: Mapping[str, Any], capabilities: Capabilities | None, limits: LimitsConfig) -> None:
    """Raises ConfigError for one that the loaded model does not take: every request would be refused."""
    if capabilities is None or not defaults:
        return
    kind = SamplingParams if capabilities.samples else OmniDiffusionSamplingParams
    for name, value in defaults.items():
        taken = name in kind.__dataclass_fields__ and (name in _ENGINE or name in capabilities.arguments)
        if not taken:
            what = f"default_sampling_params.{name}={value!r}: {capabilities.pipeline} does not take it"
            raise ConfigError(what, param="deploy_config")
    probe = with_defaults(Request(request_id="defaults", prompt="a"), defaults, capabilities)
    try:
        validate(probe, capabilities, limits)
    except InvalidRequestError as error:
        if error.param in defaults:
            raise ConfigError(f"default_sampling_params: {error.message}", param="deploy_config") from None


def with_defaults(request: Request, defaults: Mapping[str, Any], capabilities: Capabilities) -> Request:
    """Raises InvalidRequestError for parameters that the model does not take."""
    if not defaults:
        return request
    if capabilities.samples:
        filled = _filled(sampling_of(request, capabilities), defaults)
        return msgspec.structs.replace(request, sampling=filled, params=OmniDiffusionSamplingParams())
    return msgspec.structs.replace(request, params=_filled(request.params, defaults))


def _filled(params: Params, defaults: Mapping[str, Any]) -> Params:
    unset = {
        f.name
        for f in dataclasses.fields(params)
        if getattr(params, f.name) == (f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
    }
    given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in defaults.items() if n in unset}
    return replace(params, **given)

"""A model's own further arguments, those in `extra_args`: which of their values mean something.

One that is named after a field of SamplingParams, as `talker_top_k` is, is checked as that field is. Of the others
their family says what they may be (`request.Bounds`). An argument that nobody has said anything about is any number.
"""

from __future__ import annotations

import math
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.request import Bounds, Capabilities
from polymux.spelling import shown

COLDEST = 1e-6  # of temperatures that are not 0: below, numbers overflow
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_KNOWN = {
    "temperature": Bounds(COLDEST, 100),
    "top_k": Bounds(1, 10**6, "integer"),
    "top_p": Bounds(1e-6, 1),
    "min_p": Bounds(0, 1),
    "repetition_penalty": Bounds(1e-3, 100),
    "max_new_tokens": Bounds(1, 2**31, "integer"),
    "do_sample": Bounds(kind="flag"),
}


def check_further(extra: Any, capabilities: Capabilities) -> None:
    """Raises InvalidRequestError with the argument, its value and what is allowed."""
    if not isinstance(extra, dict):
        raise _refuse("extra_args", extra, "must be a dict with argument names as keys")
    for name, value in extra.items():
        if name not in capabilities.extra:
            known = f"known are {', '.join(capabilities.extra)}" if capabilities.extra else "there are none"
            raise InvalidRequestError(f"extra_args.{str(name)[:80]}: {known}", param=f"extra_args.{str(name)[:80]}")
        if (why := _wrong(value, bounds_of(name, capabilities))) is not None:
            raise _refuse(f"extra_args.{name}", value, why)
    for name, value in extra.items():
        prefix = name.removesuffix(field) if (field := _field(name)) in _DRAWING else None
        if prefix is not None and extra.get(f"{prefix}do_sample") is False:
            raise _refuse(f"extra_args.{name}", value, f"has no effect without {prefix}do_sample")


def bounds_of(name: str, capabilities: Capabilities) -> Bounds:
    """What the argument of this name may be."""
    if name in capabilities.bounds:
        return capabilities.bounds[name]
    field = _field(name)
    if field == "max_new_tokens" and capabilities.max_new_tokens is not None:
        return Bounds(1, capabilities.max_new_tokens, "integer")
    return Bounds(-math.inf, math.inf) if field is None else _KNOWN[field]


def _field(name: str) -> str | None:
    """The field of SamplingParams that an argument is named after."""
    return next((field for field in _KNOWN if name == field or name.endswith(f"_{field}")), None)


def _wrong(value: Any, bounds: Bounds) -> str | None:
    if bounds.kind == "flag":
        return None if type(value) is bool else "must be true or false"
    whole = bounds.kind == "integer"
    number = type(value) is int or (type(value) is float and not whole)
    if number and abs(value) < 2**63 and bounds.low <= value <= bounds.high:
        return None
    what = "an integer" if whole else "a number"
    return f"must be {what}" + (f" from {bounds.low:g} to {bounds.high:g}" if math.isfinite(bounds.high) else "")


def _refuse(name: str, value: Any, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={shown(value)}: {why}", param=name)

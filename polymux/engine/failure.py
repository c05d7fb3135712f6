"""What pipelines raise, in the terms of this project."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import pairwise

from polymux.diffusion.runner import is_out_of_memory
from polymux.errors import (
    GenerationError,
    InvalidRequestError,
    NonFiniteOutputError,
    OutOfMemoryError,
    PolymuxError,
    UnusableOutputError,
)
from polymux.request import Request
from polymux.spelling import shown

log = logging.getLogger(__name__)


LARGEST = 1000.0  # noise level or timestep that models are made for
_SCHEDULERS, _PICTURES = re.compile(r"[/\\]schedulers?[/\\]"), re.compile(r"image_process(ing|or)")


def as_polymux_error(
    error: BaseException,
    where: str,
    computing: bool,
    request: Request | None = None,
    unusable: Sequence[tuple[str, str]] = (),
) -> PolymuxError:
    """What a pipeline raised, in the terms of this project. `request`: of diffusion; `unusable`: as in `Family`.

    Before it computes, a pipeline does little but look at its arguments: that a value or a type is wrong there is the
    request's fault. So is what comes of a schedule that no model is made for.
    """
    schedule = None if request is None else _odd_schedule(request)
    if schedule is not None and (isinstance(error, NonFiniteOutputError) or _SCHEDULERS.search(where)):
        name, values = schedule
        what = f"with this schedule {error}; noise has to fall from step to step, and to end above 0"
        return InvalidRequestError(f"{name}={shown(values)}: {what}", param=name)
    if isinstance(error, PolymuxError):
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(f"this request does not fit in memory: {error}")
    for word, meaning in unusable:
        if word in where:
            return UnusableOutputError(f"{meaning}: another seed may help")
    if not computing and isinstance(error, (ValueError, TypeError, NotImplementedError, ArithmeticError)):
        field = None if request is None else _field_at_fault(request, where)
        named = f"{field}: " if field is not None else ""
        return InvalidRequestError(f"{named}the pipeline refuses the request: {error}", param=field)
    # The message may quote the prompt, which has no place in a log.
    log.info("a request failed with %s\n%s", type(error).__name__, where)
    return GenerationError(f"the model failed: {type(error).__name__}: {error}")


def _field_at_fault(request: Request, where: str) -> str | None:
    """Which field of a request an error is about, as far as the lines tell that it came from."""
    if "retrieve_timesteps" in where:
        return next((name for name in ("sigmas", "timesteps") if getattr(request.params, name) is not None), None)
    return next(iter(request.media), None) if _PICTURES.search(where) else None


def _odd_schedule(request: Request) -> tuple[str, Sequence[float]] | None:
    """The request's own schedule, by the name of its field, if noise does not fall in it as models are made for."""
    for name, values in (("sigmas", request.params.sigmas), ("timesteps", request.params.timesteps)):
        if values is not None:
            falls = all(before > after for before, after in pairwise(values))
            return None if falls and values[-1] > 0 and values[0] <= LARGEST else (name, values)
    return None

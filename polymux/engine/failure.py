"""What pipelines raise, in the terms of this project."""

from __future__ import annotations

import logging

from polymux.diffusion.runner import is_out_of_memory
from polymux.errors import GenerationError, InvalidRequestError, OutOfMemoryError, PolymuxError

log = logging.getLogger(__name__)


def as_polymux_error(error: BaseException, where: str, computing: bool) -> PolymuxError:
    """What a pipeline raised, in the terms of this project.

    Before it computes, a pipeline does little but look at its arguments: that a value or a type is wrong there is the
    request's fault.
    """
    if isinstance(error, PolymuxError):
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(f"this request does not fit in memory: {error}")
    if not computing and isinstance(error, (ValueError, TypeError, NotImplementedError, ArithmeticError)):
        return InvalidRequestError(f"the pipeline refuses the request: {error}")
    # The message may quote the prompt, which has no place in a log.
    log.info("a request failed with %s\n%s", type(error).__name__, where)
    return GenerationError(f"the model failed: {type(error).__name__}: {error}")

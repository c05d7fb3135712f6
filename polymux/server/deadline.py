"""How long a request may take, by its own word (`x-request-timeout`, seconds) and the operator's (`--request-timeout`).

The clock starts when the headers are there. Whoever works for a request asks `deadline_of`, and stops then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from polymux.errors import DeadlineExceededError, InvalidRequestError

T = TypeVar("T")

HEADER = "x-request-timeout"


def set_deadline(scope: Scope, longest: float | None) -> None:
    """Note when the request's time is over; `longest`: the operator's limit. Raises InvalidRequestError."""
    seconds = _seconds(Headers(scope=scope).get(HEADER))
    limits = [limit for limit in (seconds, longest) if limit is not None]
    now = asyncio.get_running_loop().time()
    scope.setdefault("state", {})["deadline"] = now + min(limits) if limits else None


def deadline_of(request: Request) -> float | None:
    """In the event loop's time; None: there is none."""
    deadline: float | None = request.state.deadline
    return deadline


def exceeded() -> DeadlineExceededError:
    return DeadlineExceededError(f"the request was not done in its time ({HEADER}, or --request-timeout)")


async def within(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns. Raises DeadlineExceededError, and cancels it, when the request's time is over."""
    try:
        async with asyncio.timeout_at(deadline_of(request)) as time:
            return await work
    except TimeoutError:
        if time.expired():
            raise exceeded() from None
        raise


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = math.nan if "_" in text else float(text)  # 1_0 is a number to Python alone
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequestError(f"{HEADER}={text[:40]!r}: must be a number of seconds above 0", param=HEADER)
    return seconds

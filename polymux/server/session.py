"""Which session a request belongs to, by its own word (`x-session-id`): replicas may keep sessions apart."""

from __future__ import annotations

import re
from typing import TypedDict

from starlette.requests import HTTPConnection

from polymux.errors import InvalidRequestError

HEADER = "x-session-id"
_SANE = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Session(TypedDict, total=False):
    """What a generator takes beside prompt and parameters."""

    session_id: str


def session_of(request: HTTPConnection) -> Session:
    """Empty: it belongs to none. Raises InvalidRequestError."""
    given = request.headers.get(HEADER)
    if given is None:
        return {}
    if not _SANE.fullmatch(given):
        raise InvalidRequestError(f"{HEADER}={given[:40]!r}: must be 1 to 128 letters, digits and ._:-", param=HEADER)
    return {"session_id": given}

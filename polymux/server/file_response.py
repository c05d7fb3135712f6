"""A file as an answer: whole or a range of it, with what clients need to resume and to revalidate.

The file is open before the answer begins, so that it can be deleted meanwhile. One range per request; who asks for
several gets the whole file, as the standard allows.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncGenerator
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from polymux.errors import RangeNotSatisfiableError
from polymux.server.errors import error_response

_RANGE = re.compile(r"bytes=[ \t]*(\d*)[ \t]*-[ \t]*(\d*)[ \t]*", re.ASCII | re.IGNORECASE)
_DIGITS = 18  # more than the size of any file has
_PIECE = 2**18


async def file_response(request: Request, path: Path, media_type: str, headers: dict[str, str]) -> Response:
    """The answer to a GET or HEAD, or all of the file to a POST. Raises FileNotFoundError."""
    file = await asyncio.to_thread(path.open, "rb")
    stat = os.fstat(file.fileno())
    told = headers | {
        "accept-ranges": "bytes",
        "etag": _etag(stat),
        "last-modified": formatdate(stat.st_mtime, usegmt=True),
    }
    if _is_known(request, told["etag"], stat.st_mtime):
        file.close()
        return Response(status_code=304, headers=told)
    bounds = _range(request, stat, told["etag"])
    if bounds is not None and bounds[0] >= bounds[1]:
        file.close()
        asked = request.headers["range"][:80]
        error = RangeNotSatisfiableError(f"Range {asked!r}: the file has {stat.st_size} bytes", param="range")
        response = error_response(error)
        response.headers["content-range"] = f"bytes */{stat.st_size}"
        return response
    start, end = bounds or (0, stat.st_size)
    told["content-length"] = str(end - start)
    if bounds is not None:
        told["content-range"] = f"bytes {start}-{end - 1}/{stat.st_size}"
    status = 200 if bounds is None else 206
    if request.method == "HEAD":
        file.close()
        return Response(status_code=status, headers=told, media_type=media_type)
    return StreamingResponse(_pieces(file, start, end), status, told, media_type)


async def _pieces(file: BinaryIO, start: int, end: int) -> AsyncGenerator[bytes]:
    try:
        await asyncio.to_thread(file.seek, start)
        left = end - start
        while left > 0 and (piece := await asyncio.to_thread(file.read, min(_PIECE, left))):
            left -= len(piece)
            yield piece
    finally:
        file.close()


def _etag(stat: os.stat_result) -> str:
    known = f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"
    return f'"{hashlib.sha256(known.encode()).hexdigest()[:32]}"'


def _is_known(request: Request, etag: str, modified: float) -> bool:
    """Whether the client has this file already."""
    if request.method == "POST":
        return False
    if (tags := request.headers.get("if-none-match")) is not None:
        return tags.strip() == "*" or etag in [tag.strip().removeprefix("W/") for tag in tags.split(",")]
    since = _time(request.headers.get("if-modified-since"))
    return since is not None and int(modified) <= since


def _range(request: Request, stat: os.stat_result, etag: str) -> tuple[int, int] | None:
    """First byte and the one after the last; not below its begin: there is no such range. None: the whole file."""
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if request.method == "POST" or found is None or not (found[1] or found[2]):
        return None
    condition = request.headers.get("if-range")
    if condition is not None and condition != etag and _time(condition) != int(stat.st_mtime):
        return None
    first, end = (_number(digits) for digits in found.groups())
    if not found[1]:
        return max(0, stat.st_size - end), stat.st_size
    start, last = first, end if found[2] else stat.st_size - 1
    if last < start and found[2]:
        return None  # no valid range at all: as if it were not there
    return start, min(last + 1, stat.st_size)


def _number(digits: str) -> int:
    """Beyond the end of any file is as good as what is meant."""
    digits = digits.lstrip("0")
    return 10**_DIGITS if len(digits) > _DIGITS else int(digits or "0")


def _time(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None

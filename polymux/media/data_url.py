"""Data URLs (RFC 2397) to bytes. What they contain is told by the bytes, not by the media type that stands in front."""

from __future__ import annotations

import base64
import binascii
import string
from urllib.parse import unquote_to_bytes

from polymux.errors import InvalidRequestError


def decode_data_url(url: str, *, param: str, max_bytes: int) -> bytes:
    """The bytes, base64 or percent-encoded. The size is checked before anything is decoded.

    Raises InvalidRequestError that names `param`.
    """
    head, comma, data = url.partition(",")
    if not comma or not head[:5].lower() == "data:":
        raise InvalidRequestError(f"{param}: not a data URL: data:[TYPE][;base64],DATA", param=param)
    in_base64 = head.rpartition(";")[2].strip().lower() == "base64"
    if _least_size(data, in_base64) > max_bytes:
        raise _too_large(param, max_bytes)
    try:
        raw = unquote_to_bytes(data.encode("ascii")) if "%" in data or not in_base64 else data.encode("ascii")
        decoded = _from_base64(raw) if in_base64 else raw
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidRequestError(f"{param}: the data URL does not hold valid data", param=param) from None
    if len(decoded) > max_bytes:
        raise _too_large(param, max_bytes)
    return decoded


def _least_size(data: str, in_base64: bool) -> int:
    """How many bytes will come out, at least."""
    characters = len(data) - 2 * data.count("%")
    return (characters - sum(map(data.count, string.whitespace))) // 4 * 3 - 2 if in_base64 else characters


def _from_base64(data: bytes) -> bytes:
    """As browsers take it: blanks do not count, and the padding may be missing."""
    data = data.translate(None, string.whitespace.encode()).rstrip(b"=")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def _too_large(param: str, max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: the data URL holds more than {max_bytes} bytes", param=param)

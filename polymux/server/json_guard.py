"""A look at JSON before anybody parses it: what would cost too much, or would not be what was sent.

Knows JSON's marks, not its meaning. Whether it is well formed is the parser's business, so a broken text passes here.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from typing import Any

from polymux.errors import InvalidRequestError

# Strings are skipped whole, also one that does not end; everything else that matters is one byte.
_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)


def check_json(body: bytes, *, max_depth: int, max_values: int) -> None:
    """Raises InvalidRequestError for a text in another encoding than UTF-8, one that is nested deeper than `max_depth`,
    one of more than `max_values` values, and one with the same name twice in an object."""
    if body.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRequestError("the body begins with a byte order mark: it must be JSON in plain UTF-8")
    depth, values = 0, 1
    for mark in _MARKS.finditer(body):
        match mark[0]:
            case b"[" | b"{":
                depth += 1
                values += 1
            case b"]" | b"}":
                depth -= 1
            case b",":
                values += 1
        if depth > max_depth:
            raise InvalidRequestError(
                f"the body is nested too deeply: allowed are {max_depth} levels (--max-json-depth)"
            )
        if values > max_values:
            raise InvalidRequestError(f"the body has too many values: allowed are {max_values} (--max-json-values)")
    _check_names(body)


def _check_names(body: bytes) -> None:
    with contextlib.suppress(ValueError):  # broken; the parser says how
        json.loads(body.decode(), object_pairs_hook=_once, parse_int=len)  # len: numbers are not looked at


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise InvalidRequestError(f"the name {name[:80]!r} is there twice in one object", param=name[:80])
        names.add(name)

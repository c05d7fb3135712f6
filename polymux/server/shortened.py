"""What a request asked for, short enough for a log line, and without media."""

from __future__ import annotations

import json
import re

from pydantic import BaseModel

MAX_TEXT = 200  # characters of one string
MAX_ITEMS = 16  # of one list or object
MAX_DEPTH = 6  # as deep as the parts of a message
MAX_LINE = 4000  # characters
LOOKED_AT = 4096  # characters of one string

# Data URLs, also in the middle of a text, and base64 without one, whether in one line or in lines of 76 characters.
_MEDIA = re.compile(r"data:[^\s,]*,\S*|[a-z0-9+/=_-]{70,}", re.IGNORECASE)


def shortened(asked: BaseModel) -> str:
    """As JSON, fields that were not given left out."""
    text = json.dumps(_short(asked.model_dump(exclude_unset=True), 0), ensure_ascii=False)
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + "..."


def _short(value: object, depth: int) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return _short_text(value)
        case dict() | list() | tuple() if depth == MAX_DEPTH:
            return "..."
        case dict():
            kept = {_short_text(str(key)): _short(item, depth + 1) for key, item in list(value.items())[:MAX_ITEMS]}
            return kept if len(value) <= MAX_ITEMS else kept | {"...": f"{len(value)} in all"}
        case list() | tuple():
            items = [_short(item, depth + 1) for item in value[:MAX_ITEMS]]
            return items if len(value) <= MAX_ITEMS else [*items, f"... {len(value)} in all"]
    return f"<{type(value).__name__}>"


def _short_text(text: str) -> str:
    if text[:5].lower() == "data:" and not text[5:6].isspace():  # to its end, for the loader skips blanks in it
        return f"<data URL of {len(text)} characters>"
    shown = _MEDIA.sub(lambda media: f"<{len(media[0])} characters>", text[:LOOKED_AT])
    if len(shown) <= MAX_TEXT and len(text) <= LOOKED_AT:
        return shown
    return f"{shown[:MAX_TEXT]}... ({len(text)} characters)"

"""How values are spelled in messages: as JSON, which is how most clients have written them, and short.

A text that stands alone is in single quotes, as all that messages quote. Knows nothing of what values mean.
"""

from __future__ import annotations

import json
import reprlib
from enum import Enum
from typing import Any


def shown(value: object) -> str:
    """A value as it stands in a message. What is long or deep is cut."""
    return _JSON.repr(value)


class _Json(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        if level == self.maxlevel:  # alone
            return super().repr_str(x, level)
        return json.dumps(x if len(x) <= self.maxstring else f"{x[: self.maxstring - 3]}...", ensure_ascii=False)

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:  # it is found by the name of the type
        return "null"

    def repr_float(self, x: float, level: int) -> str:
        return json.dumps(x)

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(x), level)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return f"{len(x)} bytes"

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Enum):
            return self.repr1(x.value, level)
        return super().repr_instance(x, level)


_JSON = _Json()

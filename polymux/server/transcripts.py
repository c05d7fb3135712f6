"""What was spoken in answers, by their ids: a client may name such an answer in its next request, in place of its text.

Kept in memory, for some time and of bounded number and size; nothing is left behind. Knows neither requests nor sound.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict

KEPT_S = 3600
MOST = 1024
MOST_CHARACTERS = 4 * 2**20  # together


class Transcripts:
    """One per server."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, str]] = OrderedDict()  # with the time at which it expires
        self._characters = 0

    def new_id(self) -> str:
        return f"audio_{uuid.uuid4().hex}"

    def keep(self, name: str, text: str) -> int:
        """Under a new id; when it expires, in seconds since 1970."""
        expires = int(time.time()) + KEPT_S
        self._kept[name] = expires, text
        self._characters += len(text)
        while self._kept and (len(self._kept) > MOST or self._characters > MOST_CHARACTERS):
            self._drop(next(iter(self._kept)))
        return expires

    def get(self, name: str) -> str | None:
        """None: there is none, or no more."""
        now = time.time()
        while self._kept and next(iter(self._kept.values()))[0] < now:
            self._drop(next(iter(self._kept)))
        return self._kept[name][1] if name in self._kept else None

    def _drop(self, name: str) -> None:
        _, text = self._kept.pop(name)
        self._characters -= len(text)

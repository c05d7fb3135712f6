"""Pictures that wait for the client that got their URL: in memory, for a while, within a bound.

In memory and not on disk, because a picture is small, its life is short, and nothing is left behind however the server
ends. Knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polymux.errors import InvalidRequestError
from polymux.server.image_answer import Picture
from polymux.server_config import FilesConfig


@dataclass(frozen=True)
class StoredPicture:
    data: bytes
    media_type: str
    expires: float  # by the store's clock


class ImageStore:
    """Names that nobody can guess, and the pictures behind them. The oldest go first when there is no room."""

    def __init__(self, config: FilesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = config.image_url_ttl
        self._max_bytes = config.image_url_bytes
        self._clock = clock
        self._pictures: dict[str, StoredPicture] = {}  # in the order in which they expire
        self._bytes = 0

    def add(self, pictures: Sequence[Picture]) -> list[str]:
        """Keep them together; their names. Raises InvalidRequestError if there could never be room for all of them."""
        size = sum(len(picture.data) for picture in pictures)
        if size > self._max_bytes:
            what = f"the pictures have {size} bytes: allowed are {self._max_bytes} (--image-url-bytes)"
            raise InvalidRequestError(f"response_format='url': {what}; use b64_json", param="response_format")
        self._expire()
        while self._bytes + size > self._max_bytes:
            self._drop(next(iter(self._pictures)))
        expires = self._clock() + self._ttl
        names = [f"{secrets.token_urlsafe(24)}.{picture.format}" for picture in pictures]
        for name, picture in zip(names, pictures, strict=True):
            self._pictures[name] = StoredPicture(picture.data, f"image/{picture.format}", expires)
        self._bytes += size
        return names

    def get(self, name: str) -> tuple[StoredPicture, int] | None:
        """A picture and the seconds that it has left; None if there is none by this name, or no more."""
        self._expire()
        found = self._pictures.get(name)
        return None if found is None else (found, int(found.expires - self._clock()))

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, picture in self._pictures.items() if picture.expires <= now]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._bytes -= len(self._pictures.pop(name).data)

"""How much memory the decoded media of all requests take together: what is small on the wire can be large here.

A picture or an array counts for as long as anybody holds it, so nobody has to give it back. Knows no requests.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from PIL import Image

from polymux.errors import OverloadedError


class HeldMedia:
    """What is in memory, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: dict[int, int] = {}  # by identity: neither pictures nor arrays have a hash

    @property
    def bytes(self) -> int:
        return sum(list(self._sizes.values()))  # a copy: media may end in any thread

    def add(self, picture: Image.Image) -> Image.Image:
        """The same picture, counted once. Raises OverloadedError if there is no room for it."""
        self._count(
            picture, picture.width * picture.height * (1 if len(picture.getbands()) == 1 else 4)
        )  # as Pillow does
        return picture

    def add_array(self, array: np.ndarray[Any, Any]) -> None:
        """The same for frames and sound."""
        self._count(array, array.nbytes)

    def _count(self, medium: object, size: int) -> None:
        key = id(medium)
        if key in self._sizes:
            return
        if self.bytes + size > self._limit:
            allowed = f"allowed are {self._limit} bytes (--max-total-media-bytes)"
            raise OverloadedError(f"the decoded media of all requests under way are too large together: {allowed}")
        self._sizes[key] = size
        weakref.finalize(medium, self._sizes.pop, key, None)

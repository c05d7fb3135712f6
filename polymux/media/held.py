"""How much memory the decoded pictures of all requests take together: what is small on the wire can be large here.

A picture counts for as long as anybody holds it, so nobody has to give it back. Knows no requests.
"""

from __future__ import annotations

import weakref

from PIL import Image

from polymux.errors import OverloadedError


class HeldPictures:
    """The pictures that are in memory, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: dict[int, int] = {}  # by identity: pictures have no hash

    @property
    def bytes(self) -> int:
        return sum(list(self._sizes.values()))  # a copy: pictures may end in any thread

    def add(self, picture: Image.Image) -> Image.Image:
        """The same picture, counted once. Raises OverloadedError if there is no room for it."""
        key = id(picture)
        if key in self._sizes:
            return picture
        size = picture.width * picture.height * (1 if len(picture.getbands()) == 1 else 4)  # as Pillow keeps them
        if self.bytes + size > self._limit:
            allowed = f"allowed are {self._limit} bytes (--max-total-media-bytes)"
            raise OverloadedError(f"the pictures of all requests under way are too large together: {allowed}")
        self._sizes[key] = size
        weakref.finalize(picture, self._sizes.pop, key, None)
        return picture

"""The one way in for media that requests bring or name: uploads, data URLs, http(s) URLs, files of this machine.

Every limit that holds for such media is held here and in the modules below. Knows neither routes nor models: which
media a request may have, and how many, is decided by whoever asks.
"""

from __future__ import annotations

import asyncio

from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.data_url import decode_data_url
from polymux.media.held import HeldMedia
from polymux.media.image import decode
from polymux.media.local import LocalSource
from polymux.media.web import WebSource
from polymux.server_config import MediaConfig

MAX_DECODERS = 4  # pictures that are decoded at once; each may take --max-input-image-size times four bytes


class MediaLoader:
    """Loads media within the limits of one `MediaConfig`. Use it in one event loop; close it at the end."""

    def __init__(self, config: MediaConfig, *, web: WebSource | None = None) -> None:
        """Raises ConfigError if the folder of local files is none. `web` stands in for the internet, in tests."""
        self._config = config
        self._web = WebSource(config) if web is None else web
        local = config.allowed_local_media_path
        self._local = None if local is None else LocalSource(local)
        self._decoders = asyncio.Semaphore(MAX_DECODERS)
        self.held = HeldMedia(config.max_total_media_bytes)

    async def image(self, source: str | bytes, *, param: str) -> Image.Image:
        """A picture, upright and in one of the modes that travel; of an animation, its first frame.

        `source` is an upload's bytes, or a string as `fetch` takes it. `param` is the field that the source came in.
        Raises InvalidRequestError that names it, and OverloadedError.
        """
        limit = self._config.max_media_bytes
        if isinstance(source, str):
            data = await self.fetch(source, param=param, max_bytes=limit)
        elif len(source) > limit:
            raise InvalidRequestError(f"{param}: the file has more than {limit} bytes (--max-media-bytes)", param=param)
        else:
            data = source
        async with self._decoders:
            limit = self._config.max_input_image_size
            return self.held.add(await asyncio.to_thread(decode, data, max_pixels=limit, param=param))

    async def fetch(self, source: str, *, param: str, max_bytes: int) -> bytes:
        """The bytes behind a data URL, an http(s) URL, or a file URL or path where local files are allowed.

        At most `max_bytes` of them, and at most --max-media-bytes. Raises InvalidRequestError that names `param`.
        """
        max_bytes = min(max_bytes, self._config.max_media_bytes)
        scheme = source[:8].lower().partition(":")[:2]
        if scheme == ("data", ":"):
            return await asyncio.to_thread(decode_data_url, source, param=param, max_bytes=max_bytes)
        if scheme in (("http", ":"), ("https", ":")):
            return await self._web.fetch(source, param=param, max_bytes=max_bytes)
        if self._local is None:
            raise InvalidRequestError(f"{param}: must be a data: URL or an http(s) URL", param=param)
        return await asyncio.to_thread(self._local.read, source, param=param, max_bytes=max_bytes)

    async def aclose(self) -> None:
        """Ends the fetches that are under way."""
        await self._web.aclose()

"""From the output of a generation to OpenAI's answer: encoded pictures, with what they are.

Encoding takes as long as many requests take to parse: `encoded` and `inline` are for a thread. Knows no requests.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.image import ImageFormat, encode, flat
from polymux.omni_output import OmniRequestOutput
from polymux.request import Capabilities
from polymux.server.profile_answer import RequestProfile
from polymux.server.protocol import EncodingFields, GeneratedImage, ImagesResponse

Background = Literal["transparent", "opaque"]


@dataclass(frozen=True)
class Encoding:
    """How pictures are written. `quality` is None for the best; `opaque`: without the alpha that the model made."""

    format: ImageFormat = "png"
    quality: int | None = None
    opaque: bool = False

    @classmethod
    def of(cls, body: EncodingFields, capabilities: Capabilities) -> Encoding:
        """Raises InvalidRequestError for a choice that would have no effect."""
        format = body.output_format or "png"
        if body.output_compression is not None and format == "png":
            message = f"output_compression={body.output_compression}: png takes none; set output_format to "
            raise InvalidRequestError(message + '"jpeg" or "webp"', param="output_compression")
        if body.background == "transparent":
            if not capabilities.alpha:
                why = "the model's pictures have no transparent parts"
                raise InvalidRequestError(f"background='transparent': {why}", param="background")
            if format == "jpeg":
                why = 'jpeg knows no transparency; set output_format to "png" or "webp"'
                raise InvalidRequestError(f"background='transparent': {why}", param="background")
        return cls(format, body.output_compression, body.background == "opaque")


@dataclass(frozen=True)
class Picture:
    """One encoded picture. `seed` makes it again with n = 1; None: no single seed made it."""

    data: bytes
    format: ImageFormat
    width: int
    height: int
    seed: int | None
    background: Background = "opaque"

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def base64(self) -> str:
        return base64.b64encode(self.data).decode()


def encoded(output: OmniRequestOutput, encoding: Encoding) -> list[Picture]:
    """All pictures of an output, in order."""
    images = [image for image in output.images if isinstance(image, Image.Image)]
    seeds = output.seeds if len(output.seeds) == len(images) else [None] * len(images)
    return [picture_of(image, encoding, seed) for image, seed in zip(images, seeds, strict=True)]


def picture_of(image: Image.Image, encoding: Encoding, seed: int | None = None) -> Picture:
    data = encode(flat(image) if encoding.opaque else image, encoding.format, encoding.quality)
    transparent = image.has_transparency_data and not encoding.opaque and encoding.format != "jpeg"
    return Picture(data, encoding.format, *image.size, seed, "transparent" if transparent else "opaque")


def inline(pictures: Sequence[Picture], output: OmniRequestOutput) -> bytes:
    """The answer with the pictures in it. Of `output`, it has the seed that was asked for or drawn, and the profile."""
    return _answer(pictures, [{"b64_json": picture.base64()} for picture in pictures], _of_all(output))


def by_url(pictures: Sequence[Picture], output: OmniRequestOutput, urls: Sequence[str], expires_at: int) -> bytes:
    """The answer with URLs of the pictures."""
    return _answer(pictures, [{"url": url} for url in urls], _of_all(output) | {"expires_at": expires_at})


def _of_all(output: OmniRequestOutput) -> dict[str, Any]:
    told = {} if output.profile is None else {"profile": RequestProfile.of(output.profile)}
    return {"seed": output.seeds[0], **told}


def _answer(pictures: Sequence[Picture], where: Sequence[dict[str, str]], rest: dict[str, Any]) -> bytes:
    data = [
        GeneratedImage(**place, seed=picture.seed, size=picture.size, output_format=picture.format)
        for picture, place in zip(pictures, where, strict=True)
    ]
    first = pictures[0]
    answer = ImagesResponse(created=int(time.time()), data=data, output_format=first.format, size=first.size, **rest)
    return answer.model_dump_json(exclude_unset=True).encode()

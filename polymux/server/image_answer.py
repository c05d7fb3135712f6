"""From the output of a generation to OpenAI's answer: encoded pictures, with what they are.

Encoding takes as long as many requests take to parse: `encoded` and `answer` are for a thread. Knows no requests.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass

from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.image import ImageFormat, encode
from polymux.omni_output import OmniRequestOutput
from polymux.server.protocol import EncodingFields, GeneratedImage, ImagesResponse


@dataclass(frozen=True)
class Encoding:
    """How pictures are written."""

    format: ImageFormat = "png"
    quality: int | None = None

    @classmethod
    def of(cls, body: EncodingFields) -> Encoding:
        """Raises InvalidRequestError for a choice that would have no effect."""
        format = body.output_format or "png"
        if body.output_compression is not None and format == "png":
            message = f"output_compression={body.output_compression}: png takes none; set output_format to "
            raise InvalidRequestError(message + '"jpeg" or "webp"', param="output_compression")
        return cls(format, body.output_compression)


@dataclass(frozen=True)
class Picture:
    """One encoded picture. `seed` makes it again with n = 1; None: no single seed made it."""

    data: bytes
    format: ImageFormat
    width: int
    height: int
    seed: int | None

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def base64(self) -> str:
        return base64.b64encode(self.data).decode()


def encoded(output: OmniRequestOutput, encoding: Encoding) -> list[Picture]:
    """All pictures of an output, in order."""
    images = [image for image in output.images if isinstance(image, Image.Image)]
    seeds = output.seeds if len(output.seeds) == len(images) else [None] * len(images)
    return [
        Picture(encode(image, encoding.format, encoding.quality), encoding.format, *image.size, seed)
        for image, seed in zip(images, seeds, strict=True)
    ]


def answer(output: OmniRequestOutput, encoding: Encoding) -> bytes:
    """The answer's bytes."""
    pictures = encoded(output, encoding)
    body = ImagesResponse(
        created=int(time.time()),
        data=[GeneratedImage(b64_json=picture.base64(), seed=picture.seed) for picture in pictures],
        output_format=encoding.format,
        size=pictures[0].size,
        seed=output.seeds[0],
    )
    return body.model_dump_json().encode()

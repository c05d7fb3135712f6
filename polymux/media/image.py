"""Pictures as bytes, at the edge: PIL to PNG, JPEG or WebP, and uploaded bytes to PIL, with limits.

Knows neither HTTP nor models: what a picture is for, and which size a model wants, is decided elsewhere.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import PurePath
from typing import Literal

from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.wire import to_mode

ImageFormat = Literal["png", "jpeg", "webp"]

EXTENSIONS: dict[str, ImageFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}

_READABLE = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # only these decoders of Pillow ever see uploaded bytes
# What Pillow's parsers raise on damaged data, beside its own UnidentifiedImageError (an OSError).
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, KeyError, struct.error, zlib.error)


def format_of(path: str) -> ImageFormat:
    """The format that a file's extension stands for. Raises InvalidRequestError for any other extension."""
    extension = PurePath(path).suffix.lower()
    if extension not in EXTENSIONS:
        raise InvalidRequestError(f"{PurePath(path).name!r}: must end in {', '.join(EXTENSIONS)}", param="output")
    return EXTENSIONS[extension]


def encode(image: Image.Image, format: ImageFormat, quality: int | None = None) -> bytes:
    """The picture as a file. `quality` (0-100) is for jpeg and webp, where None means 100; png has none to choose."""
    if format == "png" and quality is not None:
        raise ValueError("png is lossless and takes no quality")
    target = io.BytesIO()
    if format == "png":
        image.save(target, "PNG")
    elif format == "jpeg":
        flat(image).save(target, "JPEG", quality=100 if quality is None else quality)
    else:
        image.save(target, "WEBP", quality=100 if quality is None else quality)
    return target.getvalue()


def decode(data: bytes, *, max_pixels: int, param: str = "image") -> Image.Image:
    """Uploaded bytes as an upright picture in one of the modes that travel (see `polymux.media.wire`).

    The size is checked before any pixel is decoded; of an animation, the first frame counts. Raises
    InvalidRequestError, with `param`, for anything that is not a whole picture.
    """
    Image.init()  # with explicit formats, open() does not register the decoders itself
    try:
        with Image.open(io.BytesIO(data), formats=_READABLE) as image:
            width, height = image.size
            if width * height > max_pixels:
                why = f"{width}x{height} has {width * height} pixels: allowed are {max_pixels}"
                raise InvalidRequestError(f"{param}: {why}", param=param)
            image.load()
            return to_mode(image)
    except InvalidRequestError as error:  # of a mode that has no meaning here
        message = error.message if error.param == param else f"{param}: {error.message}"
        raise InvalidRequestError(message, param=param) from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"{param}: too many pixels: allowed are {max_pixels}", param=param) from None
    except _DAMAGED:
        raise InvalidRequestError(
            f"{param}: not a whole picture; readable are {', '.join(_READABLE)}", param=param
        ) from None


def flat(image: Image.Image) -> Image.Image:
    """RGB or grey, with transparent parts laid over white, for whom knows no transparency."""
    if image.mode not in ("LA", "PA", "RGBA"):
        return image
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")

"""Pictures and arrays to and from the form in which they cross process borders.

Knows PIL and numpy, neither torch nor files. Pictures travel in one of three modes; what a pipeline wants beyond that
is decided where the pipeline is called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageOps

from polymux.errors import InvalidRequestError
from polymux.request import CHANNELS, ITEM_BYTES, ArrayData, ImageData, Media

Array = np.ndarray[Any, np.dtype[Any]]


def to_wire(value: Image.Image | Array, sample_rate: int | None = None, fps: float | None = None) -> Media:
    """A picture or an array as plain bytes. Raises InvalidRequestError for what has no meaning on the other side."""
    if isinstance(value, Image.Image):
        picture = to_mode(value)
        return ImageData(picture.mode, picture.width, picture.height, picture.tobytes())
    if value.dtype.name not in ITEM_BYTES:
        raise InvalidRequestError(f"an array of {value.dtype.name}: allowed are {', '.join(ITEM_BYTES)}")
    native = np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
    return ArrayData(native.dtype.name, native.shape, native.tobytes(), sample_rate, fps)


def from_wire(media: Media) -> Image.Image | Array:
    """The picture or the (writable) array again."""
    if isinstance(media, ImageData):
        return Image.frombytes(media.mode, (media.width, media.height), media.data)
    return np.frombuffer(media.data, dtype=media.dtype).reshape(media.shape).copy()


def to_mode(picture: Image.Image) -> Image.Image:
    """The picture upright and in a mode that travels: grey stays grey, transparency stays, 16 bits become 8."""
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in CHANNELS:
        return picture
    if picture.mode.startswith("I"):
        return _eight_bits(picture)
    if picture.mode == "F":
        raise InvalidRequestError("a picture of mode F: its range is unknown; convert it to L, RGB or RGBA")
    if picture.mode == "1":
        return picture.convert("L")
    transparent = picture.mode in ("LA", "PA", "RGBa") or "transparency" in picture.info
    try:
        return picture.convert("RGBA" if transparent else "RGB")
    except ValueError as error:
        raise InvalidRequestError(f"a picture of mode {picture.mode}: {error}") from None


def _eight_bits(picture: Image.Image) -> Image.Image:
    values = np.asarray(picture).astype(np.int64)
    if values.size and not 0 <= values.min() <= values.max() <= 65535:
        raise InvalidRequestError(f"a picture of mode {picture.mode} with values outside 0..65535")
    return Image.fromarray((values // 257).astype(np.uint8))

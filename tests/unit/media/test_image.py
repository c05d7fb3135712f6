"""Pictures as bytes: formats out, anything in, and nothing but whole pictures of an allowed size."""

from __future__ import annotations

import io
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.image import EXTENSIONS, ImageFormat, decode, encode, format_of

NOISE = Image.effect_noise((48, 32), 90).convert("RGB")


def file(image: Image.Image, format: str, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, format, **options)
    return target.getvalue()


@pytest.mark.parametrize("format", get_args(ImageFormat))
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_every_format_takes_every_mode_that_travels(format: ImageFormat, mode: str) -> None:
    back = Image.open(io.BytesIO(encode(NOISE.convert(mode), format)))
    assert (back.format, back.size) == (format.upper(), NOISE.size)


def test_png_is_exact() -> None:
    assert np.array_equal(np.asarray(decode(encode(NOISE, "png"), max_pixels=10**6)), np.asarray(NOISE))


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_quality_is_honoured_and_defaults_to_100(format: ImageFormat) -> None:
    sizes = [len(encode(NOISE, format, quality)) for quality in (0, 10, 50, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == len(encode(NOISE, format))


def test_png_takes_no_quality() -> None:
    with pytest.raises(ValueError, match="lossless"):
        encode(NOISE, "png", 50)


def test_jpeg_shows_transparent_parts_on_white() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert Image.open(io.BytesIO(encode(clear, "jpeg"))).getpixel((4, 4)) == (255, 255, 255)


@pytest.mark.parametrize(("extension", "format"), EXTENSIONS.items())
def test_the_extension_names_the_format(extension: str, format: str) -> None:
    assert format_of(f"some.dir/a{extension}") == format_of(f"B{extension.upper()}") == format


@pytest.mark.parametrize("path", ["out", "out.gif", "out.", ".png", "a/b.d/out", "png"])
def test_other_extensions_are_refused(path: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.png, \.jpg"):
        format_of(path)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_readable_formats(format: str) -> None:
    assert decode(file(NOISE, format), max_pixels=10**6).size == NOISE.size


@pytest.mark.parametrize(
    ("image", "format", "mode"),
    [
        (NOISE.convert("RGBA"), "PNG", "RGBA"),
        (NOISE.convert("P"), "PNG", "RGB"),
        (NOISE.convert("LA"), "PNG", "RGBA"),
        (NOISE.convert("1"), "PNG", "L"),
        (NOISE.convert("CMYK"), "JPEG", "RGB"),
        (Image.fromarray(np.full((32, 48), 40_000, np.uint16)), "PNG", "L"),
    ],
    ids=["rgba", "palette", "grey-alpha", "bitmap", "cmyk", "16-bit"],
)
def test_modes_of_uploads(image: Image.Image, format: str, mode: str) -> None:
    decoded = decode(file(image, format), max_pixels=10**6)
    assert (decoded.mode, decoded.size) == (mode, NOISE.size)


def test_sixteen_bits_keep_their_brightness() -> None:
    grey = Image.fromarray(np.full((4, 4), 40_000, np.uint16))
    assert decode(file(grey, "PNG"), max_pixels=100).getpixel((0, 0)) == 40_000 // 257


def test_exif_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(file(NOISE, "JPEG", exif=exif), max_pixels=10**6).size == (32, 48)


def test_the_size_is_checked_before_pixels_are_decoded() -> None:
    bomb = file(Image.new("1", (20_000, 20_000)), "PNG")
    assert len(bomb) < 100_000
    with pytest.raises(InvalidRequestError, match="allowed are 1000000"):
        decode(bomb, max_pixels=10**6)


def test_the_limit_is_exact() -> None:
    decode(file(Image.new("L", (100, 99)), "PNG"), max_pixels=9900)
    with pytest.raises(InvalidRequestError, match="100x100 has 10000 pixels: allowed are 9900"):
        decode(file(Image.new("L", (100, 100)), "PNG"), max_pixels=9900)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a picture",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        file(NOISE, "PPM"),
        file(NOISE, "ICO"),
        *(file(NOISE, format)[: len(file(NOISE, format)) * 8 // 10] for format in ("PNG", "JPEG", "WEBP", "TIFF")),
    ],
    ids=["empty", "text", "svg", "eps", "ppm", "ico", "cut png", "cut jpeg", "cut webp", "cut tiff"],
)
def test_what_is_not_a_whole_picture_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a whole picture") as caught:
        decode(data, max_pixels=10**6, param="mask")
    assert caught.value.param == "mask"


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_one_kind_of_error() -> None:
    random = np.random.default_rng(1)
    sources = [file(NOISE, format) for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    refused = 0
    for i in range(600):
        data = bytearray(sources[i % len(sources)])
        for position in random.integers(0, len(data), 4):
            data[position] = random.integers(0, 256)
        try:
            decode(bytes(data), max_pixels=10**6)
        except InvalidRequestError:
            refused += 1
    assert 0 < refused < 600

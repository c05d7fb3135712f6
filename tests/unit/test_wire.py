"""Pictures and arrays arrive as they were sent."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.wire import from_wire, to_wire
from polymux.request import ITEM_BYTES, ArrayData, ImageData


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_pictures_round_trip(mode: str) -> None:
    channels = len(Image.new(mode, (1, 1)).getbands())
    picture = Image.frombytes(mode, (3, 2), bytes(range(6 * channels)))
    again = from_wire(to_wire(picture))
    assert isinstance(again, Image.Image)
    assert (again.mode, again.size, again.tobytes()) == (mode, (3, 2), picture.tobytes())


@pytest.mark.parametrize(
    ("mode", "arrives"),
    [("1", "L"), ("P", "RGB"), ("PA", "RGBA"), ("LA", "RGBA"), ("CMYK", "RGB"), ("YCbCr", "RGB"), ("I;16", "L")],
)
def test_other_modes_become_one_that_travels(mode: str, arrives: str) -> None:
    sent = to_wire(Image.new(mode, (3, 2)))
    assert isinstance(sent, ImageData)
    assert (sent.mode, sent.width, sent.height) == (arrives, 3, 2)


def test_sixteen_bits_become_eight_by_scaling() -> None:
    grey = to_wire(Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16)))
    assert isinstance(grey, ImageData)
    assert grey.data == bytes([0, 1, 255])


def test_transparency_of_a_palette_stays() -> None:
    picture = Image.new("P", (1, 1))
    picture.info["transparency"] = 0
    sent = to_wire(picture)
    assert isinstance(sent, ImageData)
    assert sent.mode == "RGBA"
    assert sent.data[3] == 0


def test_exif_rotation_is_applied() -> None:
    picture = Image.new("RGB", (4, 2))
    picture.getexif()[0x0112] = 6  # to be turned by 90 degrees
    sent = to_wire(picture)
    assert isinstance(sent, ImageData)
    assert (sent.width, sent.height) == (2, 4)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_arrays_round_trip(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    for version in (array, array.T, array[::2], array.astype(array.dtype.newbyteorder(">")), array[:0]):
        again = from_wire(to_wire(version))
        assert isinstance(again, np.ndarray)
        assert again.dtype == array.dtype
        np.testing.assert_array_equal(again, version)
        assert again.flags.writeable


def test_the_sample_rate_of_sound_travels() -> None:
    sent = to_wire(np.zeros((2, 4), np.float32), sample_rate=16000)
    assert isinstance(sent, ArrayData)
    assert sent.sample_rate == 16000


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.zeros(2, np.complex64), np.uint32([1])])
def test_arrays_without_meaning_are_refused(value: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError, match="allowed are bool, uint8"):
        to_wire(value)


def test_pictures_without_a_range_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="mode F"):
        to_wire(Image.new("F", (1, 1)))
    with pytest.raises(InvalidRequestError, match=r"outside 0\.\.65535"):
        to_wire(Image.new("I", (1, 1), 70000))

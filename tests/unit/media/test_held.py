"""Decoded pictures count for as long as they are held, and no longer."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from PIL import Image

from polymux.errors import OverloadedError
from polymux.media.held import HeldMedia


def test_what_is_held_counts_once_and_until_it_is_let_go() -> None:
    held = HeldMedia(1000)
    picture = held.add(held.add(Image.new("RGB", (10, 10))))
    grey = held.add(Image.new("L", (10, 10)))
    assert held.bytes == 500
    with pytest.raises(OverloadedError, match=r"1000 bytes \(--max-total-media-bytes\)") as caught:
        held.add(Image.new("RGBA", (10, 13)))
    assert caught.value.retry_after_s == 1
    assert held.bytes == 500
    del picture
    gc.collect()
    assert held.bytes == 100
    held.add(Image.new("RGBA", (10, 13)))
    assert grey.size == (10, 10)


def test_frames_and_sounds_count_too() -> None:
    held = HeldMedia(1000)
    frames = np.zeros((2, 10, 10, 3), np.uint8)
    held.add_array(frames)
    held.add_array(frames)
    assert held.bytes == frames.nbytes == 600
    with pytest.raises(OverloadedError):
        held.add_array(np.zeros((1, 101), np.float32))
    del frames
    gc.collect()
    assert held.bytes == 0

"""Faster and slower speech: as long as it should be, at the pitch that it had."""

from __future__ import annotations

import numpy as np
import pytest

from polymux.media.tempo import stretch

RATE = 24000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)


@pytest.mark.parametrize("speed", [0.25, 0.4, 0.8, 1.5, 2.0, 3.3, 4.0])
@pytest.mark.parametrize("channels", [1, 2])
def test_length_and_pitch(speed: float, channels: int) -> None:
    made = stretch(np.stack([TONE] * channels), RATE, speed)
    assert made.shape == (channels, round(RATE / speed)) and made.dtype == np.float32
    spectrum = np.abs(np.fft.rfft(made[-1]))
    assert abs(spectrum.argmax() * RATE / made.shape[1] - 440) < 5
    assert np.abs(made[:, -made.shape[1] // 10 :]).max() > 0.3  # the end is there


def test_at_its_own_pace_nothing_changes() -> None:
    assert np.array_equal(stretch(TONE, RATE, 1.0), TONE[np.newaxis])


def test_the_shortest() -> None:
    assert stretch(TONE[:1], RATE, 4.0).shape == (1, 1) and stretch(TONE[:50], RATE, 0.5).shape == (1, 100)


@pytest.mark.parametrize("speed", [0.0, 0.2, 4.1, -1.0, float("nan")])
def test_other_speeds_are_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed"):
        stretch(TONE, RATE, speed)

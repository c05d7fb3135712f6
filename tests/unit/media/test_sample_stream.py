"""Pieces of sound as bare samples at one rate: as long as the whole, and the same as the whole."""

from __future__ import annotations

import numpy as np
import pytest

from polymux.media.sample_stream import SampleStream
from polymux.media.wire import Array

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)).astype(np.float32)[np.newaxis]


def streamed(samples: Array, piece: int, rates: tuple[int, int]) -> Array:
    stream = SampleStream(*rates)
    data = [stream.add(samples[:, i : i + piece]) for i in range(0, samples.shape[1], piece)]
    return np.frombuffer(b"".join([*data, stream.finish()]), "<i2")


@pytest.mark.parametrize("piece", [160, 777, 8000])
def test_another_rate(piece: int) -> None:
    made = streamed(TONE, piece, (8000, 24000))
    assert np.array_equal(made, streamed(TONE, 8000, (8000, 24000)))
    assert len(made) == 24000
    spectrum = np.abs(np.fft.rfft(made.astype(float)))
    assert spectrum.argmax() == 440 and made.max() == pytest.approx(16384, rel=0.02)


def test_the_same_rate_holds_nothing_back() -> None:
    stream = SampleStream(24000, 24000)
    assert np.frombuffer(stream.add(TONE), "<i2").tolist() == (TONE[0] * 32767).round().astype(int).tolist()
    assert stream.finish() == b""


def test_two_channels_become_one() -> None:
    both = np.concatenate([TONE, -TONE])
    assert not streamed(both, 8000, (24000, 24000)).any()


def test_what_is_no_sound_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_rate"):
        SampleStream(0, 24000)
    with pytest.raises(ValueError, match="finite"):
        SampleStream(8000, 24000).add(np.full((1, 9), np.nan, np.float32))

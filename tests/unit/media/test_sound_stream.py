"""A file that grows while it is sent: what was there stays as it is, and the whole is a file of its format."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from polymux.media.audio import AudioFormat, interleaved
from polymux.media.decode import MediaLimits, decode_audio
from polymux.media.sound_stream import SoundStream

RATE = 24000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)[np.newaxis]
LIMITS = MediaLimits(file_bytes=10**8, pixels=10**6, frames=100, seconds=100)


def parts(format: AudioFormat, samples: np.ndarray = TONE) -> list[bytes]:  # type: ignore[type-arg]
    stream = SoundStream(format, RATE, len(samples))
    made = [stream.add(samples[:, i : i + 5000]) for i in range(0, samples.shape[1], 5000)]
    return [*made, stream.finish()]


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
@pytest.mark.parametrize("channels", [1, 2])
def test_the_whole_is_a_file(format: AudioFormat, channels: int) -> None:
    samples = np.concatenate([TONE] * channels)
    made = parts(format, samples)
    assert sum(map(bool, made)) > 3  # it comes in parts
    read = decode_audio(b"".join(made), LIMITS)
    assert len(read.samples) == channels and 1 <= read.samples.shape[1] / read.sample_rate < 1.06
    if format in ("wav", "flac"):
        assert np.array_equal((read.samples * 32768).round(), interleaved(samples).T)


def test_the_header_of_a_wav_file_comes_once_and_knows_no_length() -> None:
    whole = b"".join(parts("wav"))
    assert whole.count(b"RIFF") == whole.count(b"data") == 1
    assert struct.unpack("<I", whole[4:8]) == struct.unpack("<I", whole[40:44]) == (0xFFFFFFFF,)
    assert struct.unpack("<HHIIHH", whole[20:36]) == (1, 1, RATE, 2 * RATE, 2, 16)
    assert whole[44:] == interleaved(TONE).tobytes() == b"".join(parts("pcm"))


def test_a_sound_of_nothing_has_a_header() -> None:
    assert len(SoundStream("wav", RATE, 1).finish()) == 44

"""Sound files: exact where the format is, as long as what was put in, and what cannot be is refused."""

from __future__ import annotations

import io
import wave
from typing import Any, get_args

import av
import numpy as np
import pytest

from polymux.media.audio import (
    EXTENSIONS,
    MEDIA_TYPES,
    AudioFormat,
    Sound,
    audio_format_of,
    clipped,
    encode_audio,
    resample,
)

RANDOM = np.random.default_rng(0)
STEREO = RANDOM.uniform(-0.9, 0.9, (2, 5000))
INTEGERS = np.round(STEREO * 32767).astype(np.int16)
BEGINS = {"wav": b"RIFF", "flac": b"fLaC", "mp3": b"ID3", "opus": b"OggS"}


def read(data: bytes) -> tuple[Any, int]:
    """Samples (channels, samples) as they are in the file, and their rate."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        samples = np.concatenate(frames, axis=1)
        return samples.reshape(-1, stream.channels).T if not stream.format.is_planar else samples, stream.rate


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [16000, 44100, 96000])
def test_wav_flac_and_pcm_hold_the_same_samples(channels: int, rate: int) -> None:
    samples, wanted = STEREO[:channels], INTEGERS[:channels]
    file = encode_audio(samples, rate, "wav")
    with wave.open(io.BytesIO(file)) as header:
        assert (header.getnchannels(), header.getframerate(), header.getsampwidth()) == (channels, rate, 2)
        assert header.getnframes() == 5000
    assert int.from_bytes(file[4:8], "little") == len(file) - 8 and file.count(b"RIFF") == 1
    for made in (file, encode_audio(samples, rate, "flac")):
        found, found_rate = read(made)
        assert found_rate == rate and np.array_equal(found, wanted)
    assert encode_audio(samples, rate, "pcm") == wanted.T.tobytes()
    assert encode_audio(wanted, rate, "wav") == file  # int16 are taken as they are


@pytest.mark.parametrize("format", ["mp3", "opus"])
@pytest.mark.parametrize("rate", [8000, 24000, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_lossy_formats_are_as_long_and_sound_alike(format: AudioFormat, rate: int, channels: int) -> None:
    time = np.arange(rate // 4 + 3) / rate
    tone = np.stack([0.5 * np.sin(2 * np.pi * 440 * time)] * channels)
    found, found_rate = read(encode_audio(tone, rate, format))
    assert found_rate == (48000 if format == "opus" else rate) and found.shape[0] == channels
    assert found.shape[1] == pytest.approx(tone.shape[1] * found_rate / rate, abs=1)
    there = np.arange(found.shape[1]) / found_rate
    assert np.abs(found[0] - 0.5 * np.sin(2 * np.pi * 440 * there))[480:-480].max() < 0.1


@pytest.mark.parametrize("format", get_args(AudioFormat))
def test_every_format_takes_silence_little_and_odd_rates(format: AudioFormat) -> None:
    for samples, rate in ((np.zeros((1, 4000)), 8000), (np.zeros((2, 100)), 48000), (STEREO, 11000)):
        data = encode_audio(samples, rate, format)
        assert data.startswith(BEGINS.get(format, b""))
        if format != "pcm":
            found, found_rate = read(data)
            assert found.shape[1] == pytest.approx(samples.shape[1] * found_rate / rate, abs=4)


def test_what_is_beyond_the_range_is_clipped_and_counted() -> None:
    samples = np.array([[-7, -1, -0.5, 0, 0.5, 1, 1.01, np.float32(3)]], np.float32)
    assert clipped(samples) == 3 and clipped(INTEGERS) == 0
    found, _ = read(encode_audio(samples, 8000, "wav"))
    assert found[0].tolist() == [-32767, -32767, -16384, 0, 16384, 32767, 32767, 32767]
    assert encode_audio(samples[0], 8000, "wav") == encode_audio(samples, 8000, "wav")  # one dimension: mono


@pytest.mark.parametrize(
    ("samples", "rate", "named"),
    [
        (np.zeros((3, 10)), 8000, "shape"),
        (np.zeros((1, 1, 10)), 8000, "shape"),
        (np.zeros((1, 0)), 8000, "at least one"),
        (np.zeros((1, 10), np.int32), 8000, "int32"),
        (np.full((1, 10), np.nan), 8000, "finite"),
        (np.zeros((1, 10)), 0, "sample_rate=0"),
        (np.zeros((1, 10)), 44100.5, "sample_rate"),
    ],
)
def test_what_means_nothing_is_refused(samples: Any, rate: Any, named: str) -> None:
    for format in get_args(AudioFormat):
        with pytest.raises(ValueError, match=named):
            encode_audio(samples, rate, format)


def test_names_and_types() -> None:
    assert (
        audio_format_of("a/B.WAV") == "wav" and audio_format_of("a.ogg") == "opus" and audio_format_of("a.mp4") is None
    )
    assert set(EXTENSIONS.values()) == set(MEDIA_TYPES) == set(get_args(AudioFormat))


@pytest.mark.parametrize(("rate", "other"), [(44100, 48000), (8000, 44100), (48000, 16000)])
def test_resampled_sound_is_as_long_and_sounds_alike(rate: int, other: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate)
    found = resample(Sound(np.stack([tone, -tone]), rate), other)
    assert found.dtype == np.float32 and found.shape == (2, pytest.approx(other // 2, abs=2))
    wanted = np.sin(2 * np.pi * 440 * np.arange(found.shape[1]) / other)
    assert np.abs(found[0] - wanted)[200:-200].max() < 0.01 and np.abs(found[1] + wanted)[200:-200].max() < 0.01

"""Sound as bytes, at the edge: arrays of samples to WAV, FLAC, MP3, Opus and raw PCM.

Samples are arrays (channels, samples): floats, of which -1 to 1 is the full range, or int16. Floats beyond that range
are clipped to it (`clipped` counts them), others than finite ones refused. WAV, FLAC and PCM hold the same 16-bit
samples. Knows neither HTTP nor models, and resamples only where a codec knows no such rate.
"""

from __future__ import annotations

import io
import wave
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer

from polymux.media.wire import Array

AudioFormat = Literal["wav", "flac", "mp3", "opus", "pcm"]
AudioCodec = Literal["flac", "libmp3lame", "libopus", "aac", "alac"]

EXTENSIONS: dict[str, AudioFormat] = {
    ".wav": "wav",
    ".flac": "flac",
    ".mp3": "mp3",
    ".opus": "opus",
    ".ogg": "opus",
    ".pcm": "pcm",
}
MEDIA_TYPES: dict[AudioFormat, str] = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "pcm": "audio/pcm",
}

_CODECS: dict[AudioFormat, AudioCodec] = {"flac": "flac", "mp3": "libmp3lame", "opus": "libopus"}
_CONTAINERS: dict[AudioFormat, str] = {"flac": "flac", "mp3": "mp3", "opus": "ogg"}
# Rates that a codec knows; of the others, any.
_RATES: dict[AudioCodec, tuple[int, ...]] = {
    "libmp3lame": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
    "libopus": (8000, 12000, 16000, 24000, 48000),
    "aac": (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000),
}
_BITS_PER_SECOND: dict[AudioCodec, int] = {"libmp3lame": 128_000, "libopus": 96_000, "aac": 128_000}  # and channel
_SAMPLE_FORMATS: dict[AudioCodec, str] = {"flac": "s16", "alac": "s32p"}  # of the others, their own
_LAYOUTS = {1: "mono", 2: "stereo"}
_MAX_RATE = 655_350  # the highest that all formats can write down
_BLOCK = 1 << 16  # samples that are encoded at a time


class Sound(NamedTuple):
    """Samples, and how many there are per second."""

    samples: Array
    sample_rate: int


def encode_audio(samples: Array, sample_rate: int, format: AudioFormat) -> bytes:
    """The sound as a file; "pcm": bare 16-bit little-endian samples, interleaved.

    Raises ValueError for samples or a rate that mean nothing. Opus knows 48 kHz and some below, MP3 rates up to
    48 kHz: other rates are resampled to the next higher one that the format knows.
    """
    check_rate(sample_rate)
    samples = check_samples(samples)
    if not samples.size:
        raise ValueError("a sound needs at least one sample")
    if format == "pcm":
        return interleaved(samples).tobytes()
    if format == "wav":
        return _wav(interleaved(samples), sample_rate)
    target = io.BytesIO()
    with av.open(target, "w", format=_CONTAINERS[format]) as container:
        track = AudioTrack(container, _CODECS[format], sample_rate, samples.shape[0])
        track.add(samples)
        track.finish()
    return target.getvalue()


def audio_format_of(path: str) -> AudioFormat | None:
    """The format that a file's extension stands for, if it is one of sound."""
    return EXTENSIONS.get(PurePath(path).suffix.lower())


def resample(sound: Sound, sample_rate: int) -> Array:
    """The samples at another rate: float32 (channels, samples). Raises ValueError."""
    samples = check_samples(sound.samples)
    check_rate(sample_rate)
    resampler = AudioResampler(format="fltp", rate=sample_rate)
    frame = av.AudioFrame.from_ndarray(_floats(samples), format="fltp", layout=_LAYOUTS[len(samples)])
    frame.sample_rate = sound.sample_rate
    ready = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray() for part in ready], axis=1)


def clipped(samples: Array) -> int:
    """How many samples are beyond the full range, and are clipped to it in any file."""
    return int((np.abs(samples) > 1).sum()) if samples.dtype.kind == "f" else 0


def check_samples(samples: Array) -> Array:
    """The samples as (channels, samples), one channel for an array of one dimension. Raises ValueError."""
    samples = np.asarray(samples)
    samples = samples[np.newaxis] if samples.ndim == 1 else samples
    if samples.ndim != 2 or samples.shape[0] not in _LAYOUTS:
        raise ValueError(f"samples of shape {samples.shape}: must be (channels, samples), with one channel or two")
    if samples.dtype != np.int16 and samples.dtype.kind != "f":
        raise ValueError(f"samples of {samples.dtype.name}: must be floats of which -1 to 1 is the range, or int16")
    if not np.isfinite(samples).all():
        raise ValueError("samples are not all finite")
    return samples


def check_rate(sample_rate: int) -> None:
    if type(sample_rate) is not int or not 1 <= sample_rate <= _MAX_RATE:
        raise ValueError(f"sample_rate={sample_rate!r}: must be an integer from 1 to {_MAX_RATE}")


def check_channels(channels: int) -> None:
    if channels not in _LAYOUTS:
        raise ValueError(f"channels={channels!r}: must be one of {', '.join(map(str, _LAYOUTS))}")


def interleaved(samples: Array) -> Array:
    """(samples, channels) in 16 bits, little-endian. Full range is 32767, for both signs."""
    if samples.dtype == np.int16:
        return np.ascontiguousarray(samples.T, dtype="<i2")
    return np.ascontiguousarray((samples.T.astype(np.float64).clip(-1, 1) * 32767).round(), dtype="<i2")


def _wav(frames: Array, sample_rate: int) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(frames.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(frames.tobytes())
    return target.getvalue()


class AudioTrack:
    """A track of sound in a file that is being written. Samples are added chunk by chunk."""

    def __init__(self, container: OutputContainer, codec: AudioCodec, sample_rate: int, channels: int) -> None:
        check_rate(sample_rate)
        check_channels(channels)
        self.sample_rate, self.channels = sample_rate, channels
        self.samples = 0  # that were added
        self._container = container
        rate = _encodable_rate(codec, sample_rate)
        self._stream: AudioStream = container.add_stream(codec, rate=rate, layout=_LAYOUTS[channels])
        if codec in _SAMPLE_FORMATS:
            self._stream.codec_context.format = _SAMPLE_FORMATS[codec]
        if codec in _BITS_PER_SECOND:
            self._stream.bit_rate = _BITS_PER_SECOND[codec] * channels
        context = self._stream.codec_context
        self._integers = codec == "flac"  # the very samples of a WAV file
        self._resampler = AudioResampler(format=context.format, layout=context.layout, rate=rate)

    def add(self, samples: Array) -> None:
        """(channels, samples). Raises ValueError."""
        samples = check_samples(samples)
        if samples.shape[0] != self.channels:
            raise ValueError(f"samples of {samples.shape[0]} channels: the track has {self.channels}")
        for start in range(0, samples.shape[1], _BLOCK):
            self._encode(self._frame(samples[:, start : start + _BLOCK]))

    def finish(self) -> None:
        """Write out what the encoder still holds."""
        self._encode(None)
        self._container.mux(self._stream.encode(None))

    def _encode(self, frame: av.AudioFrame | None) -> None:
        for ready in self._resampler.resample(frame):
            self._container.mux(self._stream.encode(ready))

    def _frame(self, samples: Array) -> av.AudioFrame:
        layout = _LAYOUTS[self.channels]
        if self._integers:
            frame = av.AudioFrame.from_ndarray(interleaved(samples).reshape(1, -1), format="s16", layout=layout)
        else:
            frame = av.AudioFrame.from_ndarray(_floats(samples), format="fltp", layout=layout)
        frame.sample_rate = self.sample_rate
        frame.pts, frame.time_base = self.samples, Fraction(1, self.sample_rate)
        self.samples += samples.shape[1]
        return frame


def _floats(samples: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    if samples.dtype == np.int16:
        return np.ascontiguousarray(samples / np.float32(32767), dtype=np.float32)
    return np.ascontiguousarray(samples.clip(-1, 1), dtype=np.float32)


def _encodable_rate(codec: AudioCodec, sample_rate: int) -> int:
    """The rate itself, or the next higher one that the codec knows."""
    rates = _RATES.get(codec, (sample_rate,))
    return next((rate for rate in rates if rate >= sample_rate), rates[-1])

"""Sound as a file that grows at its end: bytes for every piece of sound, as it comes.

Nothing is written twice, so a header says nothing of the length: WAV's sizes are the largest there are, which players
take for "until the end". Knows neither HTTP nor models.
"""

from __future__ import annotations

import struct

import av

from polymux.media.audio import (
    AudioCodec,
    AudioFormat,
    AudioTrack,
    check_rate,
    check_samples,
    interleaved,
)
from polymux.media.wire import Array

_CODECS: dict[AudioFormat, AudioCodec] = {"flac": "flac", "mp3": "libmp3lame", "opus": "libopus"}
_CONTAINERS: dict[AudioFormat, str] = {"flac": "flac", "mp3": "mp3", "opus": "ogg"}
# Do not wait for more before packets and pages go out; and no index at the start, which only the end could fill.
_OPTIONS = {"flush_packets": "1"}
_OWN_OPTIONS: dict[AudioFormat, dict[str, str]] = {"mp3": {"write_xing": "0"}, "opus": {"page_duration": "200000"}}
_UNKNOWN = 0xFFFFFFFF


class _Pipe:
    """What an encoder writes to: can neither be read nor rewound."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


class SoundStream:
    """One file. `add` pieces of sound, then `finish`; each gives the bytes that are new. Raises ValueError."""

    def __init__(self, format: AudioFormat, sample_rate: int, channels: int) -> None:
        check_rate(sample_rate)
        self._begun = format != "wav"
        self._rate, self._channels = sample_rate, channels
        self._track: AudioTrack | None = None
        self._pipe = _Pipe()
        if format in _CODECS:
            options = _OPTIONS | _OWN_OPTIONS.get(format, {})
            self._container = av.open(self._pipe, "w", format=_CONTAINERS[format], options=options)
            self._track = AudioTrack(self._container, _CODECS[format], sample_rate, channels)

    def add(self, samples: Array) -> bytes:
        """(channels, samples)."""
        if self._track is not None:
            self._track.add(samples)
            return self._pipe.take()
        return self._header() + interleaved(check_samples(samples)).tobytes()

    def finish(self) -> bytes:
        if self._track is None:
            return self._header()
        self._track.finish()
        self._container.close()
        return self._pipe.take()

    def _header(self) -> bytes:
        """Of a WAV file, once."""
        if self._begun:
            return b""
        self._begun = True
        width = 2 * self._channels
        kind = struct.pack("<HHIIHH", 1, self._channels, self._rate, self._rate * width, width, 16)
        return b"".join([
            b"RIFF", struct.pack("<I", _UNKNOWN), b"WAVEfmt ", struct.pack("<I", len(kind)), kind,
            b"data", struct.pack("<I", _UNKNOWN),
        ])  # fmt: skip

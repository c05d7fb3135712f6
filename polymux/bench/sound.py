"""Sound as it comes from a server: bytes of a WAV file, or bare samples of 16 bits, to seconds."""

from __future__ import annotations

import struct

from polymux.bench.endpoint import BadAnswer

OPENAI_RATE = 24000  # of bare samples, which do not say it
_RIFF, _CHUNK, _FORMAT = struct.Struct("<4sI4s"), struct.Struct("<4sI"), struct.Struct("<HHIIHH")


class Sound:
    """What has come of one sound. `rate`: of bare samples of one channel; None: it is a WAV file, which says it."""

    def __init__(self, rate: int | None = None) -> None:
        self._bytes_per_second = None if rate is None else rate * 2
        self._head = b""
        self.seconds = 0.0

    def came(self, data: bytes) -> float:
        """More bytes; the seconds of sound in them. Raises BadAnswer."""
        if self._bytes_per_second is None:
            self._head += data
            data = self._after_head()
            if self._bytes_per_second is None:
                return 0.0
        seconds = len(data) / self._bytes_per_second
        self.seconds += seconds
        return seconds

    def _after_head(self) -> bytes:
        """The samples after the head of a WAV file, once it is complete."""
        head, at, rate = self._head, _RIFF.size, 0
        if len(head) < at:
            return b""
        riff, _, wave = _RIFF.unpack_from(head)
        if (riff, wave) != (b"RIFF", b"WAVE"):
            raise BadAnswer("broken_sound", "the sound is not a WAV file")
        while len(head) >= at + _CHUNK.size:
            name, size = _CHUNK.unpack_from(head, at)
            at += _CHUNK.size
            if name == b"data":
                self._bytes_per_second = rate
                if not rate:
                    raise BadAnswer("broken_sound", "the WAV file does not say its rate")
                return head[at:]
            if name == b"fmt " and len(head) >= at + _FORMAT.size:
                rate = int(_FORMAT.unpack_from(head, at)[3])
            at += size
        return b""

"""Sound that comes in pieces, as bare 16-bit samples of one channel at one rate, piece by piece."""

from __future__ import annotations

import av
from av.audio.resampler import AudioResampler

from polymux.media.audio import check_rate, check_samples, interleaved
from polymux.media.wire import Array


class SampleStream:
    """One sound. `add` its pieces, then `finish`; each gives the bytes that are new. Raises ValueError."""

    def __init__(self, source_rate: int, sample_rate: int) -> None:
        check_rate(source_rate)
        self._rate = source_rate
        same = source_rate == sample_rate  # then nothing is to be held back
        self._resampler = None if same else AudioResampler(format="s16", layout="mono", rate=sample_rate)

    def add(self, samples: Array) -> bytes:
        """(channels, samples)."""
        samples = check_samples(samples)
        if len(samples) > 1:
            samples = samples.mean(axis=0, keepdims=True).astype(samples.dtype)
        mono = interleaved(samples)
        if self._resampler is None or not mono.size:
            return mono.tobytes()
        frame = av.AudioFrame.from_ndarray(mono.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = self._rate
        return self._bytes(frame)

    def finish(self) -> bytes:
        return b"" if self._resampler is None else self._bytes(None)

    def _bytes(self, frame: av.AudioFrame | None) -> bytes:
        assert self._resampler is not None
        return b"".join(ready.to_ndarray().tobytes() for ready in self._resampler.resample(frame))

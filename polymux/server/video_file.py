"""A video on its way into a file: frames and sound as they come from the stage, encoded at once.

Synchronous: encoding is work for a thread. Knows files, not jobs; what becomes of the file is decided elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from polymux.errors import GenerationError
from polymux.media.audio import check_samples
from polymux.media.video import SOUNDING, VideoSpec, VideoWriter
from polymux.media.video_track import VideoFormat
from polymux.media.wire import Array
from polymux.omni_output import ChunkCollector, OmniRequestOutput, rows_of
from polymux.request import OutputChunk
from polymux.server.video_store import storage_error

_STEP = 16  # frames that are encoded between two pieces of sound


@dataclass(frozen=True)
class Written:
    """What the file is."""

    width: int
    height: int
    frames: int


class VideoFile:
    """One file. `add` chunks, then `finish` with the output; or `abandon` it. Raises StorageError, GenerationError."""

    def __init__(self, path: Path, format: VideoFormat, fps: float, sample_rate: int | None) -> None:
        """`sample_rate`: of the sound, should there be some."""
        self.path = path
        self._format = format
        self._fps = fps
        self._sample_rate = sample_rate
        self._chunks = ChunkCollector()  # of the sound, which comes first and is small
        self._sound: Array | None = None
        self._heard = 0  # samples of it that are in the file
        self._writer: VideoWriter | None = None

    @property
    def frames(self) -> int:
        return 0 if self._writer is None else self._writer.frames

    def size(self) -> int:
        """Bytes that are in the file by now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def add(self, chunk: OutputChunk) -> None:
        if len(chunk.shape) == 4:
            self._encode(rows_of(chunk))
        else:
            self._chunks.add(chunk)

    def finish(self, output: OmniRequestOutput) -> Written:
        """With what did not come in chunks."""
        if output.audio:
            self._sound = output.audio[0]
        for frames in output.videos:
            self._encode(frames)
        writer = self._writer
        if writer is None:
            raise GenerationError("the model made no frames")
        try:
            if self._sound is not None:
                writer.add_audio(self._sound[:, self._heard :])
            writer.close()
        except (OSError, av.FFmpegError, ValueError) as error:
            raise _named(error) from None
        return Written(*writer.size, writer.frames)

    def abandon(self) -> None:
        """Leave no file, whatever has become of it."""
        if self._writer is not None:
            self._writer.__exit__(GenerationError, None, None)
        self.path.unlink(missing_ok=True)

    def _encode(self, frames: Array) -> None:
        try:
            writer = self._writer or self._open(frames)
            for start in range(0, len(frames), _STEP):
                writer.add_frames(frames[start : start + _STEP])
                if self._sound is not None and self._sample_rate is not None:
                    until = math.ceil(writer.duration * self._sample_rate)  # in step with the frames
                    writer.add_audio(self._sound[:, self._heard : until])
                    self._heard = min(until, self._sound.shape[1])
        except (OSError, av.FFmpegError, ValueError) as error:
            raise _named(error) from None

    def _open(self, frames: Array) -> VideoWriter:
        heard = self._chunks.media_of(0)
        if heard:
            self._sound = heard[0]
        if self._sound is not None:
            self._sound = check_samples(np.asarray(self._sound))
        if self._format not in SOUNDING or self._sample_rate is None:
            self._sound = None
        spec = VideoSpec(
            width=frames.shape[2],
            height=frames.shape[1],
            fps=self._fps,
            format=self._format,
            sample_rate=None if self._sound is None else self._sample_rate,
            channels=None if self._sound is None else self._sound.shape[0],
        )
        self._writer = VideoWriter(self.path, spec)
        return self._writer


def _named(error: Exception) -> Exception:
    if isinstance(error, OSError):
        return storage_error(error)
    return GenerationError(f"the video could not be encoded: {error}")

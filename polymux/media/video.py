"""Video as files, at the edge: arrays of frames to MP4, WebM, GIF and animated WebP, with sound where there is some.

Frames are encoded as they are added, so a long video is never in memory twice. What they may be:

- uint8 (frames, height, width, 3), RGB; or floats, of which 0 to 1 is the range: clipped to it and rounded to eight
  bits. Anything else is refused, so nothing deeper than eight bits is cut down unnoticed.
- MP4 (H.264) and WebM (VP9) are written as BT.709, limited range, 4:2:0, and marked so. 4:2:0 knows no odd sizes: an
  odd last column or row is doubled, see `VideoWriter.size`. Lossless files, GIF and WebP keep every size.
- Frames per second are a fraction; 23.976, 29.97 and 59.94 mean 24000/1001 and so on. WebM and WebP tell times in
  thousandths of a second, GIF in hundredths: each frame is shown from the nearest one.

Encoding is work: do it in a thread. A writer belongs to one thread at a time; several may run at once.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from types import TracebackType
from typing import BinaryIO, Self

import av
import numpy as np

from polymux.media.audio import AudioCodec, AudioTrack, Sound, check_channels, check_rate, check_samples
from polymux.media.video_track import ENCODERS, LOSSLESS, Encoder, Frame, VideoFormat, VideoTrack
from polymux.media.wire import Array

EXTENSIONS: dict[str, VideoFormat] = {".mp4": "mp4", ".webm": "webm", ".gif": "gif", ".webp": "webp"}
MEDIA_TYPES: dict[VideoFormat, str] = {
    "mp4": "video/mp4",
    "webm": "video/webm",
    "gif": "image/gif",
    "webp": "image/webp",
}

_SOUND: dict[VideoFormat, AudioCodec] = {"mp4": "aac", "webm": "libopus"}
SOUNDING: tuple[VideoFormat, ...] = tuple(_SOUND)  # formats that hold sound

_LOSSLESS_SOUND: dict[VideoFormat, AudioCodec] = {"mp4": "alac"}
_MAX_FPS: dict[VideoFormat, int] = {"mp4": 1000, "webm": 500, "gif": 50, "webp": 500}
_MIN_FPS = Fraction(1, 100)
_MAX_SIDE = 16383  # of all formats
_CHUNK = 16  # frames


@dataclass(frozen=True, kw_only=True)
class VideoSpec:
    """What a video file will be. Sound needs both `sample_rate` and `channels`. Raises ValueError for what cannot be.

    quality: the encoder's own number, crf for mp4 (0-51) and webm (0-63) where lower is better, 0-100 for webp.
    lossless: decoded frames are the very arrays that were added; sound is kept to 24 bits.
    """

    width: int
    height: int
    fps: float | Fraction
    format: VideoFormat = "mp4"
    sample_rate: int | None = None
    channels: int | None = None
    lossless: bool = False
    quality: int | None = None

    def __post_init__(self) -> None:
        if not (1 <= self.width <= _MAX_SIDE and 1 <= self.height <= _MAX_SIDE):
            raise ValueError(f"{self.width}x{self.height}: sides must be from 1 to {_MAX_SIDE} pixels")
        if self.format not in ENCODERS:
            raise ValueError(f"format={self.format!r}: must be one of {', '.join(ENCODERS)}")
        if self.lossless and self.format not in LOSSLESS:
            raise ValueError(f"{self.format} cannot be lossless; {', '.join(LOSSLESS)} can")
        check_fps(self.fps, self.format)
        if (self.sample_rate is None) != (self.channels is None):
            raise ValueError("sound needs both sample_rate and channels")
        if self.sample_rate is not None and self.channels is not None:
            check_rate(self.sample_rate)
            check_channels(self.channels)
            self.sound_codec()
        self.encoder()

    def encoder(self) -> Encoder:
        """With the wanted quality among its options."""
        found = (LOSSLESS if self.lossless else ENCODERS)[self.format]
        if found.quality is None:
            if self.quality is not None:
                raise ValueError(f"quality={self.quality}: there is none to choose")
            return found
        name, usual = found.quality
        best = {"webm": 63, "webp": 100}.get(self.format, 51)
        value = usual if self.quality is None else self.quality
        if not 0 <= value <= best:
            raise ValueError(f"quality={value}: must be from 0 to {best} for {self.format}")
        return Encoder(found.codec, found.pixels, found.options | {name: str(value)})

    def muxer_options(self) -> dict[str, str]:
        if self.format != "mp4":
            return {}
        # How long a track is shown is told in the file's own units of time: for sound, that they be samples.
        ticks = {} if self.sample_rate is None else {"movie_timescale": str(self.sample_rate)}
        return {"movflags": "+faststart"} | ticks

    def sound_codec(self) -> AudioCodec:
        codecs = _LOSSLESS_SOUND if self.lossless else _SOUND
        if self.format not in codecs:
            kind = f"lossless {self.format}" if self.lossless else self.format
            raise ValueError(f"{kind} holds no sound; {', '.join(codecs)} does")
        return codecs[self.format]


class VideoWriter:
    """Writes one file, chunk by chunk.

    with VideoWriter(path, VideoSpec(width=832, height=480, fps=16)) as writer:
        for frames in decoded:
            writer.add_frames(frames)

    An MP4 has its index in front, so that it plays while it is loaded. Leaving by an exception leaves no file. Sound
    and frames start together; neither is cut to the length of the other. Raises ValueError for frames or samples that
    do not fit the spec, OSError if the file cannot be written.
    """

    def __init__(self, target: Path | BinaryIO, spec: VideoSpec) -> None:
        self.spec = spec
        self._target = target
        self._stack = ExitStack()
        # What has its index in front is read once more while it is written: that needs a file with a name.
        self._file = target if isinstance(target, Path) else self._scratch()
        # With "file:" a name is a name, whatever it looks like.
        self._container = av.open(f"file:{self._file}", "w", format=spec.format, options=spec.muxer_options())
        self._stack.callback(self._container.close)
        self._audio: AudioTrack | None = None
        try:
            self._video = VideoTrack(self._container, spec.encoder(), (spec.width, spec.height), exact_fps(spec.fps))
            if spec.sample_rate is not None and spec.channels is not None:
                self._audio = AudioTrack(self._container, spec.sound_codec(), spec.sample_rate, spec.channels)
        except BaseException:
            self._abandon()
            raise

    @property
    def frames(self) -> int:
        """How many were added."""
        return self._video.frames

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the pictures in the file."""
        return self._video.width, self._video.height

    @property
    def duration(self) -> Fraction:
        """Seconds that the frames added so far take."""
        return self.frames / exact_fps(self.spec.fps)

    def add_frames(self, frames: Array) -> None:
        """(frames, height, width, 3). Raises ValueError."""
        wanted = (self.spec.height, self.spec.width, 3)
        if frames.ndim != 4 or frames.shape[1:] != wanted:
            raise ValueError(f"frames of shape {frames.shape}: must be (frames, {', '.join(map(str, wanted))})")
        for frame in frames:
            self._video.add(eight_bits(frame))

    def add_audio(self, samples: Array) -> None:
        """(channels, samples). Raises ValueError."""
        if self._audio is None:
            raise ValueError("the spec has no sound: give sample_rate and channels")
        self._audio.add(samples)

    def close(self) -> None:
        """Finish the file. Raises ValueError if it has no frame, or none of the sound that its spec has."""
        try:
            if not self.frames:
                raise ValueError("a video needs at least one frame")
            if self._audio is not None and not self._audio.samples:
                raise ValueError("the spec has sound, and none was added")
            self._video.finish()
            if self._audio is not None:
                self._audio.finish()
            self._container.close()
            if not isinstance(self._target, Path):
                with open(self._file, "rb") as written:
                    shutil.copyfileobj(written, self._target)
        except BaseException:
            self._abandon()
            raise
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        with suppress(av.FFmpegError):  # of a file that cannot be finished; what led here is the error to see
            self._stack.close()
        if isinstance(self._target, Path) and self._target.is_file():  # and not a device
            self._target.unlink()

    def _scratch(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="polymux-"))) / "video"


def encode_video(
    frames: Array,
    fps: float | Fraction,
    target: Path | BinaryIO,
    *,
    format: VideoFormat = "mp4",
    sound: Sound | None = None,
    lossless: bool = False,
) -> None:
    """A whole video, with its sound. Raises ValueError and OSError as `VideoWriter` does."""
    if frames.ndim != 4:
        raise ValueError(f"frames of shape {frames.shape}: must be (frames, height, width, 3)")
    samples = None if sound is None else check_samples(sound.samples)
    spec = VideoSpec(
        width=frames.shape[2],
        height=frames.shape[1],
        fps=fps,
        format=format,
        sample_rate=None if sound is None else sound.sample_rate,
        channels=None if samples is None else samples.shape[0],
        lossless=lossless,
    )
    with VideoWriter(target, spec) as writer:
        heard = 0
        for start in range(0, len(frames), _CHUNK):
            writer.add_frames(frames[start : start + _CHUNK])
            if samples is not None and sound is not None:  # in step with the frames, so that no packet waits for long
                until = math.ceil(writer.duration * sound.sample_rate)
                writer.add_audio(samples[:, heard:until])
                heard = until
        if samples is not None:
            writer.add_audio(samples[:, heard:])


def video_format_of(path: str) -> VideoFormat | None:
    """The format that a file's extension stands for, if it is one of video."""
    return EXTENSIONS.get(PurePath(path).suffix.lower())


def exact_fps(fps: float | Fraction) -> Fraction:
    """Frames per second as the fraction that is meant: 23.976 is 24000/1001."""
    if isinstance(fps, Fraction):
        return fps
    television = Fraction(round(fps * 1.001) * 1000, 1001)
    if not float(fps).is_integer() and abs(float(television) - fps) < 5e-4:
        return television
    return Fraction(fps).limit_denominator(100_000)


def frames_for(seconds: float, fps: float | Fraction, multiple: int = 1) -> int:
    """How many frames last that long, or a little longer: 1 more than a multiple of `multiple`."""
    needed = math.ceil(round(seconds * exact_fps(fps), 6))
    return -(-max(needed - 1, 0) // multiple) * multiple + 1


def check_fps(fps: float | Fraction, format: VideoFormat) -> None:
    """Raises ValueError for a rate that the format cannot tell."""
    if not math.isfinite(fps) or not _MIN_FPS <= fps <= _MAX_FPS[format]:
        raise ValueError(f"fps={fps}: must be from {float(_MIN_FPS)} to {_MAX_FPS[format]} for {format}")


def eight_bits(frame: Array) -> Frame:
    """Pixels as uint8, floats of 0 to 1 clipped and rounded. Raises ValueError for anything else."""
    if frame.dtype == np.uint8:
        return frame
    if frame.dtype.kind != "f":
        raise ValueError(f"frames of {frame.dtype.name}: must be uint8, or floats of which 0 to 1 is the range")
    if not np.isfinite(frame).all():
        raise ValueError("frames are not all finite")
    return (frame.astype(np.float32) * 255).round().clip(0, 255).astype(np.uint8)

"""Video and sound that come in: files to arrays, with limits that hold before anything is decoded, and while it is.

Nothing of a file is trusted: its kind is told by its first bytes and only those demuxers and decoders see it that are
named here; what its headers promise is checked before anything is decoded, what comes out while it is. A file that
ends early or has broken frames is refused as a whole. Knows neither HTTP nor models.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.reformatter import ColorTrc
from av.video.stream import VideoStream

from polymux.errors import InvalidRequestError
from polymux.media.audio import Sound
from polymux.media.video_track import THREADS
from polymux.media.wire import Array

# The first bytes of a file (after how many others), the demuxer, and what users call it.
_KINDS: tuple[tuple[int, bytes, str, str], ...] = (
    (4, b"ftyp", "mov", "MP4"),
    (0, b"\x1aE\xdf\xa3", "matroska", "WebM"),
    (8, b"AVI ", "avi", "AVI"),
    (0, b"GIF8", "gif", "GIF"),
    (8, b"WAVE", "wav", "WAV"),
    (0, b"fLaC", "flac", "FLAC"),
    (0, b"OggS", "ogg", "Ogg"),
    (0, b"ID3", "mp3", "MP3"),
    (0, b"\xff\xfb", "mp3", "MP3"),
    (0, b"\xff\xf3", "mp3", "MP3"),
    (0, b"\xff\xf2", "mp3", "MP3"),
)
_VIDEO_CODECS = {"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg", "gif", "ffv1", "prores"}
_AUDIO_CODECS = {"aac", "alac", "flac", "mp3", "mp2", "opus", "vorbis"}  # and everything that begins with pcm_
_HIGH_DYNAMIC_RANGE = {ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67}
_MAX_CHANNELS = 8
_MAX_RATE = 768_000
_SLACK_S = 0.25  # by which headers may overstate how long a file is


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What a file may be. Its frames and samples together take at most `decoded_bytes` of memory."""

    file_bytes: int
    pixels: int  # of one frame
    frames: int
    seconds: float
    decoded_bytes: int = 2 * 2**30


@dataclass(frozen=True)
class DecodedVideo:
    """Frames are uint8 (frames, height, width, 3), RGB and upright; deeper ones are rounded to eight bits."""

    frames: Array
    fps: Fraction  # on average
    sound: Sound | None


def decode_video(source: bytes | Path, limits: MediaLimits, *, param: str = "video") -> DecodedVideo:
    """A whole video file. Raises InvalidRequestError, with `param`, for anything else and for what is over a limit."""
    reader = _Reader(limits, param)
    with _opened(source, limits, param) as container:
        if not container.streams.video:
            raise reader.refuse("the file holds no video")
        video = container.streams.video[0]
        audio = container.streams.audio[0] if container.streams.audio else None
        reader.check_video(container, video)
        if audio is not None:
            reader.check_audio(container, audio)
        reader.read(container, video, audio)
        if not reader.frames:
            raise reader.refuse("the file holds no frames")
        frames = np.stack(reader.frames)
        reader.frames.clear()
        rate = video.average_rate or video.guessed_rate
        if not rate:
            raise reader.refuse("the file does not say how many frames per second it has")
        return DecodedVideo(frames, Fraction(rate), reader.sound(audio) if audio is not None else None)


def decode_audio(source: bytes | Path, limits: MediaLimits, *, param: str = "audio") -> Sound:
    """The sound of a file: float32 samples (channels, samples), at the file's own rate. Raises InvalidRequestError."""
    reader = _Reader(limits, param)
    with _opened(source, limits, param) as container:
        if not container.streams.audio:
            raise reader.refuse("the file holds no sound")
        audio = container.streams.audio[0]
        reader.check_audio(container, audio)
        reader.read(container, None, audio)
        return reader.sound(audio)


@contextmanager
def _opened(source: bytes | Path, limits: MediaLimits, param: str) -> Iterator[InputContainer]:
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            if size > limits.file_bytes:
                raise InvalidRequestError(f"{param}: {size} bytes: allowed are {limits.file_bytes}", param=param)
            # Opening decodes a first frame, which must not be huge. As coded, frames are larger by up to a block.
            options = {"max_pixels": str(2 * limits.pixels + 2**16)}
            demuxer = _demuxer(file, param)
            # The open file is all that the demuxer gets, so it cannot reach any other.
            with av.open(file, "r", format=demuxer, options=options, metadata_errors="replace") as container:
                yield container
    except (av.FFmpegError, EOFError, OverflowError, ValueError) as error:
        raise InvalidRequestError(f"{param}: not a whole media file: {error}", param=param) from None


def _demuxer(file: BinaryIO, param: str) -> str:
    start = file.read(16)
    for offset, magic, demuxer, name in _KINDS:
        if start[offset:].startswith(magic):
            if _is_cut(file, start, demuxer):
                raise InvalidRequestError(f"{param}: not a whole {name} file", param=param)
            file.seek(0)
            return demuxer
    readable = ", ".join(dict.fromkeys(name for _, _, _, name in _KINDS))
    raise InvalidRequestError(f"{param}: not a media file that is known; readable are {readable}", param=param)


def _is_cut(file: BinaryIO, start: bytes, demuxer: str) -> bool:
    """Whether the end is missing, of kinds whose demuxers take what there is."""
    size = file.seek(0, io.SEEK_END)
    if demuxer == "gif":
        file.seek(max(0, size - 1))
        return file.read(1) != b";"
    if start.startswith(b"RIFF"):
        told = int.from_bytes(start[4:8], "little")
        return told not in (0, 2**32 - 1) and told + 8 > size  # those two: written without knowing
    return False


class _Reader:
    """Decodes, and counts what it has."""

    def __init__(self, limits: MediaLimits, param: str) -> None:
        self.limits, self.param = limits, param
        self.frames: list[Array] = []
        self.blocks: list[Array] = []  # of sound
        self.samples = 0
        self.bytes = 0
        self.end = 0.0  # seconds, of what was decoded

    def refuse(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self.param}: {why}", param=self.param)

    def check_video(self, container: InputContainer, video: VideoStream) -> None:
        """What the headers say."""
        context = video.codec_context
        if context.codec.canonical_name not in _VIDEO_CODECS:
            raise self.refuse(
                f"video in {context.codec.canonical_name}: allowed are {', '.join(sorted(_VIDEO_CODECS))}"
            )
        self._check_size(context.width, context.height)
        self._check_frames(video.frames)
        self._check_seconds(_seconds(container))
        if context.color_trc in _HIGH_DYNAMIC_RANGE:
            raise self.refuse("high dynamic range (PQ or HLG) has no meaning in eight bits: convert it first")
        context.thread_count, context.thread_type = THREADS, "AUTO"

    def check_audio(self, container: InputContainer, audio: AudioStream) -> None:
        codec = audio.codec_context.codec.canonical_name
        if codec not in _AUDIO_CODECS and not codec.startswith("pcm_"):
            raise self.refuse(f"sound in {codec}: allowed are {', '.join(sorted(_AUDIO_CODECS))} and PCM")
        if not 1 <= audio.rate <= _MAX_RATE or not 1 <= audio.channels <= _MAX_CHANNELS:
            raise self.refuse(f"sound of {audio.channels} channels at {audio.rate} Hz")
        self._check_seconds(_seconds(container))

    def read(self, container: InputContainer, video: VideoStream | None, audio: AudioStream | None) -> None:
        """All frames and samples of the two."""
        resampler = AudioResampler(format="fltp")
        for packet in container.demux([stream for stream in (video, audio) if stream is not None]):
            for frame in packet.decode():
                if not isinstance(frame, (av.VideoFrame, av.AudioFrame)):
                    continue
                if frame.is_corrupt:
                    raise self.refuse("not a whole media file: a part of it is damaged")
                if isinstance(frame, av.VideoFrame):
                    self._add_frame(frame)
                else:
                    self._add_samples(frame, resampler)
        if video is not None and len(self.frames) < video.frames:
            raise self.refuse(f"not a whole media file: it says {video.frames} frames and has {len(self.frames)}")
        if self.end < _seconds(container) - _SLACK_S:
            wanted = _seconds(container)
            raise self.refuse(f"not a whole media file: it says {wanted:.2f} s and ends after {self.end:.2f}")

    def sound(self, audio: AudioStream) -> Sound:
        if not self.blocks:
            raise self.refuse("the file holds no samples")
        samples = np.concatenate(self.blocks, axis=1)
        if audio.duration is not None and audio.time_base is not None:  # the last block is filled up with silence
            samples = samples[:, : math.ceil(audio.duration * audio.time_base * audio.rate)]
        if not np.isfinite(samples).all():
            raise self.refuse("its samples are not all finite")
        return Sound(samples, audio.rate)

    def _add_frame(self, frame: av.VideoFrame) -> None:
        self._check_frames(len(self.frames) + 1)
        self._check_size(frame.width, frame.height)
        self._count(3 * frame.width * frame.height)
        pixels = frame.to_ndarray(format="rgb24")
        upright = np.rot90(pixels, round(frame.rotation / 90) % 4)
        if self.frames and upright.shape != self.frames[0].shape:
            raise self.refuse("its frames are of different sizes")
        self.frames.append(upright)
        self._passed((frame.time or 0.0) + float((frame.duration or 0) * (frame.time_base or 0)))

    def _add_samples(self, frame: av.AudioFrame, resampler: AudioResampler) -> None:
        self._check_seconds((self.samples + frame.samples) / frame.sample_rate)
        self._count(4 * frame.samples * frame.layout.nb_channels)
        self.samples += frame.samples
        self._passed((frame.time or 0.0) + frame.samples / frame.sample_rate)
        for ready in resampler.resample(frame):
            block = ready.to_ndarray()
            if self.blocks and len(block) != len(self.blocks[0]):
                raise self.refuse("its sound changes the number of channels")
            self.blocks.append(block)

    def _passed(self, seconds: float) -> None:
        self.end = max(self.end, seconds)

    def _count(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.limits.decoded_bytes:
            raise self.refuse(f"more than {self.limits.decoded_bytes} bytes when decoded")

    def _check_size(self, width: int, height: int) -> None:
        if not width or not height:
            raise self.refuse(f"frames of no size that can be read: allowed are {self.limits.pixels} pixels")
        if width * height > self.limits.pixels:
            raise self.refuse(f"frames of {width}x{height} pixels: allowed are {self.limits.pixels}")

    def _check_frames(self, frames: int) -> None:
        if frames > self.limits.frames:
            raise self.refuse(f"{frames} frames or more: allowed are {self.limits.frames}")

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self.limits.seconds:
            raise self.refuse(f"{seconds:.2f} s or more: allowed are {self.limits.seconds:g}")


def _seconds(container: InputContainer) -> float:
    return (container.duration or 0) / av.time_base

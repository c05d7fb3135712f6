"""Video files: what was put in comes out, in number, time, size and colour; and what cannot be is refused."""

from __future__ import annotations

import io
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import av
import numpy as np
import pytest
from PIL import Image

from polymux.media.audio import Sound
from polymux.media.video import VideoSpec, VideoWriter, encode_video, exact_fps, frames_for
from polymux.media.video_track import VideoFormat

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 256, (7, 32, 48, 3), dtype=np.uint8)
ODD = RANDOM.integers(0, 256, (3, 31, 47, 3), dtype=np.uint8)
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (200, 100, 50)]
FLAT = np.stack([np.full((32, 48, 3), colour, np.uint8) for colour in COLOURS])
STEREO = RANDOM.uniform(-0.5, 0.5, (2, 24000)).astype(np.float32)


def encoded(frames: Any, fps: float | Fraction = 8, **options: Any) -> bytes:
    target = io.BytesIO()
    encode_video(frames, fps, target, **options)
    return target.getvalue()


class Read:
    """A file as PyAV reads it, or Pillow where it is an animation."""

    def __init__(self, data: bytes) -> None:
        if data[8:12] == b"WEBP":
            self._animation(data)
            return
        with av.open(io.BytesIO(data)) as container:
            video = container.streams.video[0]
            decoded = list(container.decode(video))
            self.frames = np.stack([frame.to_ndarray(format="rgb24") for frame in decoded])
            self.times = [frame.time for frame in decoded]
            self.seconds = (container.duration or 0) / av.time_base
            self.fps, self.context = video.average_rate, video.codec_context
            self.pixels = self.context.pix_fmt
        with av.open(io.BytesIO(data)) as container:
            self.audio = None
            if container.streams.audio:
                decoded_sound = list(container.decode(container.streams.audio[0]))
                self.audio = np.concatenate([frame.to_ndarray() for frame in decoded_sound], axis=1)
                self.audio_start = decoded_sound[0].time

    def _animation(self, data: bytes) -> None:
        image = Image.open(io.BytesIO(data))
        frames, milliseconds = [], []
        for i in range(image.n_frames):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
            milliseconds.append(image.info["duration"])
        self.frames, self.seconds = np.stack(frames), sum(milliseconds) / 1000


@pytest.mark.parametrize("format", get_args(VideoFormat))
@pytest.mark.parametrize("fps", [1, 8, 12.5, 23.976, 30])
@pytest.mark.parametrize("count", [1, 7])
def test_frames_and_seconds_are_exact(format: VideoFormat, fps: float, count: int) -> None:
    read = Read(encoded(NOISE[:count], fps, format=format))
    tick = {"mp4": 1e-6, "webm": 1e-3, "gif": 1e-2, "webp": 1e-3}[format]
    assert len(read.frames) == count
    if format == "webp" and count == 1:
        return  # a still picture, which has no duration
    assert read.seconds == pytest.approx(float(count / exact_fps(fps)), abs=tick)
    if format in ("mp4", "webm"):
        assert read.fps == exact_fps(fps)
        assert read.times == pytest.approx([float(i / exact_fps(fps)) for i in range(count)], abs=tick)


def test_television_rates_are_fractions() -> None:
    assert exact_fps(23.976) == Fraction(24000, 1001) == exact_fps(24000 / 1001)
    assert exact_fps(29.97) == Fraction(30000, 1001) and exact_fps(59.94) == Fraction(60000, 1001)
    assert [exact_fps(fps) for fps in (24, 24.0, 12.5, 0.5)] == [24, 24, Fraction(25, 2), Fraction(1, 2)]
    assert exact_fps(23.9) == Fraction(239, 10)


@pytest.mark.parametrize("format", ["mp4", "webm", "webp"])
@pytest.mark.parametrize("frames", [NOISE, ODD, ODD[:1], ODD[:, :1, :1]], ids=["even", "odd", "one", "pixel"])
def test_lossless_is_exact(format: VideoFormat, frames: Any) -> None:
    assert np.array_equal(Read(encoded(frames, format=format, lossless=True)).frames, frames)


@pytest.mark.parametrize("format", ["mp4", "webm"])
def test_colours_are_marked_and_come_back(format: VideoFormat) -> None:
    read = Read(encoded(FLAT, format=format))
    context = read.context
    assert (read.pixels, context.colorspace, context.color_range) == ("yuv420p", 1, 1)
    assert (context.color_primaries, context.color_trc) == (1, 1)
    assert np.abs(read.frames.astype(int) - FLAT).max() <= 2


def test_a_smooth_picture_comes_back_in_every_format() -> None:
    y, x = np.mgrid[:64, :96]
    frames = np.stack([np.stack([x * 2 + t, y * 3, x + y + t], -1) % 256 for t in range(0, 64, 16)]).astype(np.uint8)
    for format, allowed in (("mp4", 2.0), ("webm", 2.0), ("webp", 4.0), ("gif", 5.0)):
        read = Read(encoded(frames, format=format))
        assert np.abs(read.frames.astype(int) - frames).mean() < allowed, format


def test_an_odd_last_column_and_row_are_doubled() -> None:
    blocks = np.repeat(FLAT[:1], 2, axis=0)[:, :31, :47].copy()
    blocks[:, 30] = blocks[:, :, 46] = (0, 0, 255)
    target = io.BytesIO()
    with VideoWriter(target, VideoSpec(width=47, height=31, fps=8)) as writer:
        writer.add_frames(blocks)
        assert writer.size == (48, 32)
    read = Read(target.getvalue())
    assert read.frames.shape == (2, 32, 48, 3)
    assert np.abs(read.frames[:, 31].astype(int) - (0, 0, 255)).max() < 40
    for format in ("gif", "webp"):
        assert Read(encoded(ODD, format=format)).frames.shape == ODD.shape


def test_an_mp4_has_its_index_in_front(tmp_path: Path) -> None:
    encode_video(NOISE, 8, tmp_path / "a.mp4")
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    assert encoded(NOISE) == data  # a file in memory is the same, and encoding is repeatable


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [16000, 24000, 44100])
def test_sound_starts_with_the_frames_and_is_as_long(channels: int, rate: int) -> None:
    time = np.arange(rate) / rate
    click = np.where((time > 0.5) & (time < 0.52), np.sin(time * 2 * math.pi * 1000), 0)
    sound = Sound(np.stack([click] * channels), rate)
    read = Read(encoded(NOISE[:4], 4, sound=sound))
    assert read.seconds == pytest.approx(1, abs=1e-3)
    assert read.audio is not None and read.audio.shape[0] == channels and read.audio_start == 0
    first = np.flatnonzero(np.abs(read.audio[0]) > 0.3)[0] / rate
    assert first == pytest.approx(0.5, abs=0.005)


def test_lossless_sound_keeps_24_bits() -> None:
    read = Read(encoded(NOISE, 7, sound=Sound(STEREO, 24000), lossless=True))
    assert read.audio is not None and read.audio.shape == STEREO.shape
    assert np.abs(read.audio / 2**31 - STEREO).max() <= 2**-23
    assert np.array_equal(read.frames, NOISE)


def test_sound_of_another_length_is_not_cut() -> None:
    read = Read(encoded(NOISE[:1], 8, sound=Sound(STEREO, 24000), lossless=True))
    assert len(read.frames) == 1 and read.audio is not None and read.audio.shape[1] == 24000


def test_floats_are_clipped_and_rounded() -> None:
    frames = np.array([-0.5, 0, 0.4999 / 255, 0.5001 / 255, 1, 7], np.float32)
    frames = np.broadcast_to(frames[None, None, :, None], (1, 2, 6, 3))
    for dtype in (np.float32, np.float64):
        read = Read(encoded(frames.astype(dtype), lossless=True))
        assert read.frames[0, 0, :, 0].tolist() == [0, 0, 0, 1, 255, 255]


def spec(**options: Any) -> VideoSpec:
    return VideoSpec(**{"width": 16, "height": 16, "fps": 8} | options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fps": 0}, "fps=0"),
        ({"fps": math.nan}, "fps=nan"),
        ({"fps": 60, "format": "gif"}, "50"),
        ({"width": 0}, "0x16"),
        ({"format": "avi"}, "avi"),
        ({"format": "gif", "lossless": True}, "lossless"),
        ({"format": "webp", "sample_rate": 8000, "channels": 1}, "no sound"),
        ({"format": "webm", "lossless": True, "sample_rate": 8000, "channels": 1}, "no sound"),
        ({"sample_rate": 8000}, "channels"),
        ({"sample_rate": 0, "channels": 1}, "sample_rate=0"),
        ({"sample_rate": 8000, "channels": 3}, "channels=3"),
        ({"quality": 52}, "quality=52"),
        ({"quality": 10, "lossless": True}, "quality=10"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        spec(**options)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((1, 16, 16, 3), np.uint16),
        np.zeros((1, 16, 16, 3), np.int32),
        np.zeros((1, 16, 16, 4), np.uint8),
        np.zeros((1, 16, 18, 3), np.uint8),
        np.zeros((16, 16, 3), np.uint8),
        np.full((1, 16, 16, 3), np.nan),
    ],
)
def test_other_frames_are_refused_and_leave_no_file(frames: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frames"), VideoWriter(tmp_path / "a.mp4", spec()) as writer:
        writer.add_frames(np.zeros((1, 16, 16, 3), np.uint8))
        writer.add_frames(frames)
    assert list(tmp_path.iterdir()) == []


def test_no_frame_is_no_video(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"), VideoWriter(tmp_path / "a.mp4", spec()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_sound_that_was_promised_must_come(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="none was added"),
        VideoWriter(tmp_path / "a.webm", spec(format="webm", sample_rate=8000, channels=1)) as writer,
    ):
        writer.add_frames(np.zeros((1, 16, 16, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    frames = np.broadcast_to(NOISE[:, :, :32], (7, 32, 32, 3))
    with pytest.raises(OSError, match="No space left"):
        encode_video(np.tile(frames, (3, 4, 4, 1)), 8, full, format="webm")
    assert full.exists()
    with pytest.raises(FileNotFoundError):
        encode_video(frames, 8, tmp_path / "nowhere" / "a.mp4")


def test_a_name_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe:1", "a%d.mp4", "data:x,y"):
        encode_video(NOISE, 8, Path(name))
        assert len(Read(Path(name).read_bytes()).frames) == len(NOISE)


def test_writers_run_side_by_side() -> None:
    videos = [RANDOM.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        files = list(pool.map(lambda frames: encoded(frames, lossless=True), videos))
    assert all(np.array_equal(Read(f).frames, v) for f, v in zip(files, videos, strict=True))


def test_frames_that_last_as_long() -> None:
    assert [frames_for(s, 16, 4) for s in (0.01, 1 / 16, 1, 17 / 16, 5)] == [1, 1, 17, 17, 81]
    assert frames_for(1, 24) == 24 and frames_for(2, 23.976) == 48 and frames_for(0.1, 30) == 3

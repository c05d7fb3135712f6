"""Files that come in: arrays out, limits first, and no broken, foreign or hostile file gets through."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.errors import InvalidRequestError
from polymux.media.audio import AudioFormat, Sound, encode_audio
from polymux.media.decode import MediaLimits, decode_audio, decode_video
from polymux.media.video import encode_video

RANDOM = np.random.default_rng(0)
FRAMES = RANDOM.integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)
STEREO = RANDOM.uniform(-0.5, 0.5, (2, 48000)).astype(np.float32)
LIMITS: dict[str, Any] = dict(file_bytes=10**7, pixels=10**4, frames=20, seconds=5)


def video(**options: Any) -> bytes:
    target = io.BytesIO()
    encode_video(FRAMES, options.pop("fps", 12.5), target, **options)
    return target.getvalue()


def limits(**changes: Any) -> MediaLimits:
    return MediaLimits(**LIMITS | changes)


@pytest.mark.parametrize("format", ["mp4", "webm"])
def test_a_video_comes_back(format: Any, tmp_path: Path) -> None:
    data = video(format=format, lossless=True)
    (tmp_path / "named.txt").write_bytes(data)  # the name does not matter
    for source in (data, tmp_path / "named.txt"):
        got = decode_video(source, limits())
        assert np.array_equal(got.frames, FRAMES) and got.fps == Fraction(25, 2) and got.sound is None


@pytest.mark.parametrize("format", ["mp4", "webm"])
def test_its_sound_comes_too(format: Any) -> None:
    got = decode_video(video(format=format, sound=Sound(STEREO, 48000)), limits())
    assert got.frames.shape == FRAMES.shape and got.sound is not None
    assert got.sound.sample_rate == 48000 and got.sound.samples.shape[0] == 2
    assert got.sound.samples.shape[1] == 48000
    assert np.array_equal(decode_audio(video(format=format, sound=Sound(STEREO, 48000)), limits()).samples,
                          got.sound.samples)  # fmt: skip


def test_an_animation_is_a_video() -> None:
    got = decode_video(video(format="gif", fps=10), limits())
    assert got.frames.shape == FRAMES.shape and got.fps == 10


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_sound_comes_back(format: AudioFormat) -> None:
    got = decode_audio(encode_audio(STEREO, 48000, format), limits())
    assert (got.sample_rate, got.samples.shape, got.samples.dtype) == (48000, STEREO.shape, np.float32)
    if format in ("wav", "flac"):
        assert np.abs(got.samples - STEREO).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"file_bytes": 100}, "100"),
        ({"pixels": 32 * 48 - 1}, "48x32"),
        ({"frames": 8}, "allowed are 8"),
        ({"seconds": 0.5}, "allowed are 0.5"),
        ({"decoded_bytes": FRAMES.nbytes - 1}, "when decoded"),
    ],
)
@pytest.mark.parametrize("format", ["mp4", "webm", "gif"])
def test_limits_hold(change: dict[str, Any], named: str, format: Any) -> None:
    data = video(format=format)
    assert len(decode_video(data, limits(decoded_bytes=FRAMES.nbytes)).frames) == 9
    with pytest.raises(InvalidRequestError, match=named) as caught:
        decode_video(data, limits(**change), param="input_reference")
    assert caught.value.param == "input_reference" and caught.value.status == 400


@pytest.mark.parametrize("format", ["mp4", "webm", "gif"])
def test_a_huge_frame_is_refused(format: Any) -> None:
    target = io.BytesIO()
    encode_video(np.zeros((1, 1024, 1024, 3), np.uint8), 8, target, format=format)
    for pixels in (1, 100, 512 * 1024):
        with pytest.raises(InvalidRequestError, match=f"allowed are {pixels}"):
            decode_video(target.getvalue(), limits(pixels=pixels))


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_limits_hold_for_sound(format: AudioFormat) -> None:
    data = encode_audio(STEREO, 48000, format)
    for change in ({"seconds": 0.5}, {"file_bytes": 1000}, {"decoded_bytes": 8 * 40000}):
        with pytest.raises(InvalidRequestError, match=r"allowed|when decoded") as caught:
            decode_audio(data, limits(**change))
        assert caught.value.param == "audio"


@pytest.mark.parametrize("format", ["mp4", "webm", "gif"])
@pytest.mark.parametrize("part", [0, 0.01, 0.3, 0.6, 0.8])
def test_a_part_of_a_file_is_refused(format: Any, part: float) -> None:
    target = io.BytesIO()
    encode_video(np.repeat(FRAMES, 2, axis=0), 4, target, format=format)
    data = target.getvalue()
    with pytest.raises(InvalidRequestError, match="video: ") as caught:
        decode_video(data[: int(len(data) * part)], limits())
    assert caught.value.param == "video"


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
@pytest.mark.parametrize("part", [0, 0.01, 0.5])
def test_a_part_of_a_sound_is_refused(format: AudioFormat, part: float) -> None:
    data = encode_audio(STEREO, 48000, format)
    with pytest.raises(InvalidRequestError, match="audio: "):
        decode_audio(data[: int(len(data) * part)], limits())


def test_noise_in_a_file_never_gets_past_the_errors() -> None:
    sound = Sound(STEREO, 48000)
    for data in (video(sound=sound), video(format="webm", sound=sound), video(format="gif")):
        for _ in range(15):
            broken = bytearray(data)
            for place in RANDOM.integers(0, len(data), 20):
                broken[place] = RANDOM.integers(256)
            for decode in (decode_video, decode_audio):
                try:
                    decode(bytes(broken), limits())
                except InvalidRequestError as error:
                    assert error.param


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n",
        b"<?xml version='1.0'?><MPD></MPD>",
        b"\x89PNG\r\n\x1a\n" + bytes(100),
    ],
)
def test_files_that_name_others_are_not_media(data: bytes) -> None:
    for decode in (decode_video, decode_audio):
        with pytest.raises(InvalidRequestError, match="readable are MP4"):
            decode(data, limits())


def test_a_sound_is_no_video_and_the_other_way_round() -> None:
    with pytest.raises(InvalidRequestError, match="holds no video"):
        decode_video(encode_audio(STEREO, 48000, "wav"), limits())
    with pytest.raises(InvalidRequestError, match="holds no sound"):
        decode_audio(video(), limits())


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_turned_video_comes_upright(turns: int) -> None:
    """A phone writes the pixels lying, and in the track's header how they are to be turned."""
    cosine, sine = [(1, 0), (0, 1), (-1, 0), (0, -1)][turns]
    data = video(lossless=True)
    place = data.index(b"tkhd") + 4 + 40
    matrix = [cosine * 65536, sine * 65536, 0, -sine * 65536, cosine * 65536, 0, 0, 0, 2**30]
    turned = data[:place] + b"".join(n.to_bytes(4, "big", signed=True) for n in matrix) + data[place + 36 :]
    # The header's angle is clockwise.
    assert np.array_equal(decode_video(turned, limits()).frames, np.rot90(FRAMES, -turns, axes=(1, 2)))

"""Files that go in: decoded before the model is loaded, and given to the argument that the model has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from polymux.cli.input_files import FLAGS, InputFile, media_for, read
from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.media.audio import encode_audio
from polymux.media.video import encode_video
from polymux.request import Capabilities

LIMITS = LimitsConfig(max_generated_image_size=64 * 64, max_num_frames=8)
FRAMES = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
CAN = Capabilities(
    family=None, pipeline="FakePipeline", modality="video", arguments=(), required=(), media={}, sample_rate=16000
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("media")
    Image.new("RGB", (48, 32), "red").save(made / "a.png")
    Image.new("RGB", (65, 64), "red").save(made / "large.png")
    encode_video(FRAMES, 8, made / "a.mp4", lossless=True)
    encode_video(FRAMES, 8, made / "a.gif", format="gif")
    encode_video(np.concatenate([FRAMES, FRAMES]), 8, made / "long.mp4")
    (made / "a.wav").write_bytes(encode_audio(np.zeros((2, 800)), 8000, "wav"))
    (made / "broken.mp4").write_bytes(b"not a video")
    return made


def given(folder: Path, **names: str) -> list[InputFile]:
    return [read(flag, str(folder / name), LIMITS) for flag, name in names.items()]


def can(**media: int) -> Capabilities:
    return msgspec.structs.replace(CAN, media=media)


def test_each_flag_finds_its_argument(folder: Path) -> None:
    files = given(folder, image="a.png", last_image="a.png", mask="a.png", video="a.mp4", audio="a.wav")
    assert {file.name for file in files} == set(FLAGS)
    media: Any = media_for(files, can(image=1, last_image=1, mask_image=1, video=1, src_audio=1))
    assert list(media) == ["image", "last_image", "mask_image", "video", "src_audio"]
    assert np.array_equal(media["video"][0], FRAMES)
    samples, rate = media["src_audio"][0]
    assert rate == 16000 and samples.shape == (2, pytest.approx(1600, abs=2))  # resampled to the model's
    other: Any = media_for(files[:3], can(reference_images=4, last_image=1, mask=1))
    assert list(other) == ["reference_images", "last_image", "mask"]
    assert len(media_for(files[:1] * 3, can(image=3))["image"]) == 3


def test_a_mask_may_be_a_video_and_a_gif_either(folder: Path) -> None:
    (mask,) = given(folder, mask="a.mp4")
    assert isinstance(mask.medium, np.ndarray) and mask.medium.shape == FRAMES.shape
    (picture, video) = given(folder, image="a.gif", video="a.gif")
    assert isinstance(picture.medium, Image.Image) and isinstance(video.medium, np.ndarray)


def test_an_argument_can_be_named(folder: Path) -> None:
    file = read("control_image", str(folder / "a.png"), LIMITS, exact=True)
    assert list(media_for([file], can(image=1, control_image=1))) == ["control_image"]
    with pytest.raises(InvalidRequestError, match="takes no control_image; it takes image") as caught:
        media_for([file], can(image=1))
    assert caught.value.param == "media"


@pytest.mark.parametrize("flag", FLAGS)
def test_what_the_model_does_not_take_is_refused(flag: str, folder: Path) -> None:
    name = {"video": "a.mp4", "audio": "a.wav"}.get(flag, "a.png")
    with pytest.raises(InvalidRequestError, match=r"FakePipeline takes no .*; it takes no media") as caught:
        media_for(given(folder, **{flag: name}), can())
    assert caught.value.param == flag


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("image", "a.mp4"),
        ("image", "gone.png"),
        ("image", "large.png"),
        ("video", "a.png"),
        ("video", "a.wav"),
        ("video", "broken.mp4"),
        ("video", "long.mp4"),
        ("audio", "a.png"),
        ("audio", "a.mp4"),
        ("mask", "gone.png"),
    ],
)
def test_what_is_no_such_file_is_refused(flag: str, name: str, folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=name.replace(".", r"\.")) as caught:
        given(folder, **{flag: name})
    assert caught.value.param == flag


def test_pictures_are_read_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (48, 32)).save(tmp_path / "a.jpg", exif=exif)
    medium = read("image", str(tmp_path / "a.jpg"), LIMITS).medium
    assert isinstance(medium, Image.Image) and medium.size == (32, 48)

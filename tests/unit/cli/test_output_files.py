"""What is written: endings that fit, several outputs, videos with their sound, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polymux.cli.output_files import ENDINGS, Target, write
from polymux.errors import ConfigError, GenerationError, InvalidRequestError
from polymux.media.decode import MediaLimits, decode_audio, decode_video
from polymux.omni_output import OmniRequestOutput
from polymux.request import Modality

RANDOM = np.random.default_rng(0)
LIMITS = MediaLimits(file_bytes=10**7, pixels=10**4, frames=100, seconds=10)
FRAMES = RANDOM.integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
SOUND = RANDOM.uniform(-0.5, 0.5, (2, 4000)).astype(np.float32)


def output(modality: Modality, **fields: Any) -> OmniRequestOutput:
    return OmniRequestOutput(request_id="r", prompt="a", modality=modality, **fields)


def written(made: OmniRequestOutput, path: Path | None, fps: float | None = None) -> list[Path]:
    return list(write(made, Target(path), fps))


@pytest.mark.parametrize("ending", ENDINGS["video"])
def test_a_video(ending: str, tmp_path: Path) -> None:
    files = written(output("video", videos=[FRAMES]), tmp_path / f"a{ending}", 10)
    if ending == ".png":
        assert [file.name for file in files] == [f"a-{n:04d}.png" for n in range(5)]
        assert np.array_equal(np.stack([np.asarray(Image.open(file)) for file in files]), FRAMES)
        return
    assert files == [tmp_path / f"a{ending}"]
    if ending != ".webp":
        got = decode_video(files[0], LIMITS)
        assert got.frames.shape == FRAMES.shape and got.fps == 10


def test_a_video_with_sound_and_where_there_is_no_room_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = output("video", videos=[FRAMES], audio=[SOUND], sample_rate=8000)
    (file,) = written(made, tmp_path / "a.mp4", 10)
    sound = decode_video(file, LIMITS).sound
    assert sound is not None and sound.samples.shape[0] == 2 and capsys.readouterr().err == ""
    written(made, tmp_path / "a.gif", 10)
    assert "a.gif holds no sound" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [e for e in ENDINGS["audio"] if e != ".pcm"])
def test_sound(ending: str, tmp_path: Path) -> None:
    (file,) = written(output("audio", audio=[SOUND], sample_rate=8000), tmp_path / f"a{ending}")
    assert decode_audio(file, LIMITS).samples.shape[0] == 2


def test_what_was_clipped_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(output("audio", audio=[SOUND * 4], sample_rate=8000), tmp_path / "a.wav")
    assert "samples are beyond full scale" in capsys.readouterr().err


def test_several_outputs_are_numbered(tmp_path: Path) -> None:
    made = output("audio", audio=[SOUND, -SOUND], sample_rate=8000)
    assert [file.name for file in written(made, tmp_path / "a.wav")] == ["a-0.wav", "a-1.wav"]


def test_without_a_name_the_model_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture = Image.new("RGB", (4, 4))
    assert written(output("image", images=[picture]), None) == [Path("out.png")]
    assert written(output("video", videos=[FRAMES]), None, 8) == [Path("out.mp4")]
    assert written(output("audio", audio=[SOUND], sample_rate=8000), None) == [Path("out.wav")]


@pytest.mark.parametrize(
    ("modality", "name"),
    [("image", "a.mp4"), ("image", "a.wav"), ("image", "a.gif"), ("video", "a.wav"), ("video", "a.jpg"),
     ("audio", "a.mp4"), ("audio", "a.png")],
)  # fmt: skip
def test_an_ending_for_something_else_is_refused(modality: Modality, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"the model makes .* must end in one of \.") as caught:
        Target.of(name).check(modality, "the model")
    assert caught.value.param == "output"


def test_places_that_are_none(tmp_path: Path) -> None:
    for name, error in (("a.xyz", InvalidRequestError), (str(tmp_path), ConfigError), ("/no/such/a.mp4", ConfigError)):
        with pytest.raises(error) as caught:
            Target.of(name)
        assert caught.value.param == "output"


def test_rates_are_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="--fps"):
        written(output("video", videos=[FRAMES]), tmp_path / "a.mp4")
    with pytest.raises(GenerationError, match="samples per second"):
        written(output("audio", audio=[SOUND]), tmp_path / "a.wav")
    assert list(tmp_path.iterdir()) == []


def test_frames_per_second_that_a_file_cannot_have(tmp_path: Path) -> None:
    Target(None).check_fps(60)
    Target(tmp_path / "a.png").check_fps(None)
    for name, fps in (("a.gif", 60.0), ("a.mp4", 0.001), ("a.mp4", None)):
        with pytest.raises(InvalidRequestError) as caught:
            Target(tmp_path / name).check_fps(fps)
        assert caught.value.param == "fps"


def test_what_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=r"a\.mp4 cannot be written: No such file"):
        written(output("video", videos=[FRAMES]), tmp_path / "gone" / "a.mp4", 8)

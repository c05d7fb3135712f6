"""What `polymux generate` writes: which endings go with what a model makes, and the files themselves.

Knows outputs and files, and nothing of how they are made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from polymux.errors import ConfigError, GenerationError, InvalidRequestError
from polymux.media import audio, image, video
from polymux.media.audio import Sound
from polymux.media.wire import Array
from polymux.omni_output import OmniRequestOutput
from polymux.request import Modality

FRAMES = ".png"  # of a video: a picture for each frame
TEXT = ".txt"

ENDINGS: dict[Modality, tuple[str, ...]] = {
    "image": tuple(image.EXTENSIONS),
    "video": (*video.EXTENSIONS, FRAMES),
    "audio": tuple(audio.EXTENSIONS),
    "text": (TEXT,),
}
WORDS: dict[Modality, str] = {"image": "pictures", "video": "videos", "audio": "sound", "text": "text"}


@dataclass(frozen=True)
class Target:
    """Where output goes. Without a path it is named after what the model makes."""

    path: Path | None

    @classmethod
    def of(cls, given: str | None) -> Target:
        """Raises ConfigError for a place that is none, InvalidRequestError for an ending that nothing is written to."""
        if given is None:
            return cls(None)
        path = Path(given)
        if path.is_dir():
            raise ConfigError(f"{given!r} is a folder", param="output")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {str(path.parent)!r}", param="output")
        if not any(path.suffix.lower() in endings for endings in ENDINGS.values()):
            every = ", ".join(dict.fromkeys(e for endings in ENDINGS.values() for e in endings))
            raise InvalidRequestError(f"{path.name!r}: must end in one of {every}", param="output")
        return cls(path)

    @property
    def is_text(self) -> bool:
        return self.path is not None and self.path.suffix.lower() == TEXT

    def check_fps(self, fps: float | None) -> None:
        """Raises InvalidRequestError for frames per second that the file cannot have. For videos."""
        format = "mp4" if self.path is None else video.video_format_of(self.path.name)
        if format is None:
            return
        if fps is None:
            raise InvalidRequestError("the model does not say how many it makes, and the file needs it", param="fps")
        try:
            video.check_fps(fps, format)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="fps") from None

    def check(self, modality: Modality, model: str) -> None:
        """Raises InvalidRequestError if the model makes something that such a file does not hold."""
        if modality not in ENDINGS:
            raise InvalidRequestError(f"{model} makes {modality}, which is not written to files here", param="model")
        if self.path is not None and self.path.suffix.lower() not in ENDINGS[modality]:
            what = f"{model} makes {WORDS[modality]}: the file must end in one of {', '.join(ENDINGS[modality])}"
            raise InvalidRequestError(f"{self.path.name!r}: {what}", param="output")

    def for_output(self, modality: Modality, index: int, count: int) -> Path:
        path = self.path or Path("out" + {"image": ".png", "video": ".mp4", "audio": ".wav"}.get(modality, ""))
        return path.with_stem(f"{path.stem}-{index}") if count > 1 else path


def write(output: OmniRequestOutput, target: Target, fps: float | None) -> Iterator[Path]:
    """Every file, when it is written. `fps` is for videos. Raises GenerationError if that fails."""
    assert output.modality is not None
    if output.modality == "text":
        yield from _write_text(output, target)
        return
    count = len(output.images) or len(output.videos) or len(output.audio)
    for i in range(count):
        path = target.for_output(output.modality, i, count)
        try:
            if output.modality == "image":
                picture = output.images[i]
                assert isinstance(picture, Image.Image)
                path.write_bytes(image.encode(picture, image.format_of(path.name)))
                yield path
            elif output.modality == "video":
                yield from _write_video(output, i, path, fps)
            else:
                _write_sound(output, i, path)
                yield path
        except OSError as error:
            raise GenerationError(f"{path} cannot be written: {error.strerror}") from None


def _write_text(output: OmniRequestOutput, target: Target) -> Iterator[Path]:
    """Into the file, if there is one; else it is printed."""
    (text,) = output.text
    if target.path is None:
        print(text)
        return
    try:
        target.path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GenerationError(f"{target.path} cannot be written: {error.strerror}") from None
    yield target.path


def _write_video(output: OmniRequestOutput, i: int, path: Path, fps: float | None) -> Iterator[Path]:
    frames, sound = output.videos[i], _sound_of(output, i)
    format = video.video_format_of(path.name)
    if sound is not None and format not in video.SOUNDING:
        _say(f"{path} holds no sound, so the model's sound is left out; {' and '.join(video.SOUNDING)} hold it")
        sound = None
    if format is None:
        yield from _write_frames(frames, path)
        return
    if fps is None:
        raise GenerationError("the model does not say how many frames per second its videos have: give --fps")
    if sound is not None:
        _say_clipped(sound.samples)
    video.encode_video(frames, fps, path, format=format, sound=sound)
    yield path


def _write_frames(frames: Array, path: Path) -> Iterator[Path]:
    digits = max(4, len(str(len(frames) - 1)))
    for n, frame in enumerate(frames):
        one = path.with_stem(f"{path.stem}-{n:0{digits}d}")
        one.write_bytes(image.encode(Image.fromarray(video.eight_bits(frame)), "png"))
        yield one


def _write_sound(output: OmniRequestOutput, i: int, path: Path) -> None:
    sound, format = _sound_of(output, i), audio.audio_format_of(path.name)
    assert format is not None
    if sound is None:
        raise GenerationError("the model does not say how many samples per second it made")
    _say_clipped(sound.samples)
    path.write_bytes(audio.encode_audio(sound.samples, sound.sample_rate, format))


def _sound_of(output: OmniRequestOutput, i: int) -> Sound | None:
    if i >= len(output.audio) or output.sample_rate is None:
        return None
    return Sound(np.asarray(output.audio[i]), output.sample_rate)


def _say_clipped(samples: Array) -> None:
    if many := audio.clipped(samples):
        _say(f"{many} of {samples.size} samples are beyond full scale and were clipped to it")


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)

"""Media that `polymux generate` reads: files to pictures, frames and sound, and which argument of a pipeline gets them.

A flag says what a file is for (--image, --mask, ...). What a pipeline calls that is known when the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.media import audio, image, video
from polymux.media.audio import Sound, resample
from polymux.media.decode import MediaLimits, decode_audio, decode_video
from polymux.prompts import Medium
from polymux.request import Capabilities

FLAGS: dict[str, str] = {
    "image": "input picture; may be given several times",
    "last_image": "picture that a video ends with",
    "mask": "picture or video that tells what is to be made anew",
    "video": "input video",
    "audio": "input sound; resampled to the model's rate",
}

# By flag: the arguments of pipelines that may be meant, the likeliest first.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "image": (
        "image",
        "images",
        "input_images",
        "reference_images",
        "image_reference",
        "conditioning_image",
        "control_image",
    ),
    "last_image": ("last_image",),
    "mask": ("mask_image", "mask"),
    "video": ("video",),
    "audio": ("audio", "src_audio", "initial_audio_waveforms", "reference_audio"),
}
_MAX_BYTES = 2**30
_MAX_SECONDS = 3600


@dataclass(frozen=True)
class InputFile:
    """`name` is a flag's, or with `exact` that of the pipeline's argument."""

    name: str
    path: str
    medium: Medium
    exact: bool = False
    fps: float | None = None  # of a video


def read(name: str, path: str, limits: LimitsConfig, *, exact: bool = False) -> InputFile:
    """Raises InvalidRequestError, with the flag as its parameter."""
    flag = "media" if exact else name
    kind = "picture" if name in ("image", "last_image") else "sound" if name == "audio" else ""
    try:
        medium, fps = _decoded(Path(path), kind or _kind(path, name), limits)
        return InputFile(name, path, medium, exact, fps)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", param=flag) from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error.message}", param=flag) from None


def _kind(path: str, name: str) -> str:
    """Of a file whose flag leaves it open. A GIF is a picture for a mask, and a video for --video."""
    if name == "video":
        return "video"
    suffix = Path(path).suffix.lower()
    if suffix in audio.EXTENSIONS:
        return "sound"
    return "video" if suffix in video.EXTENSIONS and suffix not in image.EXTENSIONS else "picture"


def _decoded(path: Path, kind: str, limits: LimitsConfig) -> tuple[Medium, float | None]:
    """With the frames per second of a video."""
    allowed = MediaLimits(
        file_bytes=_MAX_BYTES,
        pixels=limits.max_generated_image_size,
        frames=limits.max_num_frames,
        seconds=_MAX_SECONDS,
    )
    if kind == "picture":
        return image.decode(path.read_bytes(), max_pixels=limits.max_generated_image_size), None
    if kind == "video":
        film = decode_video(path, allowed)
        return film.frames, float(film.fps)
    sound = decode_audio(path, allowed)
    return (sound.samples, sound.sample_rate), None


def media_for(files: list[InputFile], capabilities: Capabilities) -> dict[str, list[Medium]]:
    """The files by the pipeline's names. Sound is resampled to the model's rate. Raises InvalidRequestError."""
    media: dict[str, list[Medium]] = {}
    for file in files:
        media.setdefault(_argument(file, capabilities), []).append(_fitting(file, capabilities))
    return media


def _argument(file: InputFile, capabilities: Capabilities) -> str:
    names = (file.name,) if file.exact else ARGUMENTS[file.name]
    for name in names:
        if name in capabilities.media:
            return name
    takes = f"it takes {', '.join(capabilities.media)}" if capabilities.media else "it takes no media"
    flag = "media" if file.exact else file.name
    raise InvalidRequestError(f"{capabilities.pipeline} takes no {' or '.join(names)}; {takes}", param=flag)


def _fitting(file: InputFile, capabilities: Capabilities) -> Medium:
    medium, sample_rate = file.medium, capabilities.hears_at or capabilities.sample_rate
    if capabilities.chats and file.fps is not None and isinstance(medium, np.ndarray):
        return medium, file.fps
    if isinstance(medium, tuple) and sample_rate is not None and medium[1] != sample_rate:
        return resample(Sound(*medium), sample_rate), sample_rate
    return medium

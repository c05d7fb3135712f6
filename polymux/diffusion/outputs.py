"""From a pipeline's result to what it holds: the pictures, frames or sounds of one output, still where they were made.

Pipelines return pictures as PIL or arrays, video as arrays (batch, frames, height, width, channels) or tensors (batch,
frames, channels, height, width), sound as (batch, channels, samples). A session makes one output, so the batch axis
goes. How the values reach the host is not known here, see `polymux.diffusion.host_copy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from polymux.errors import GenerationError, NonFiniteOutputError
from polymux.interpolation.frames import Smoothing
from polymux.media.wire import to_wire
from polymux.request import Media, Modality

Array = np.ndarray[Any, np.dtype[Any]]

# What pipelines call their results, by what a model makes.
OUTPUTS: dict[Modality, tuple[str, ...]] = {
    "image": ("images", "image"),
    "video": ("frames", "videos", "video"),
    "audio": ("audios", "audio"),
    "text": ("text",),
}


@dataclass(frozen=True)
class RawOutput:
    """What one session made. `frames`: `main` is one video, with eight bits per channel wanted of it; its axes are
    (frames, height, width, channels), or with `channels_first` (frames, channels, height, width). `smoothing`: frames
    are to be put between those of the video."""

    main: list[Any]
    sound: list[Any]
    frames: bool = False
    channels_first: bool = False
    smoothing: Smoothing | None = None


def raw_output(result: Any, modality: Modality, as_pictures: bool, tensors: bool = False) -> RawOutput:
    """Sort a pipeline's result. Touches no values, and waits for no device. `as_pictures`: eight bits per channel, as
    files have them, in place of floats. `tensors`: the pipeline was asked for such."""
    main = _unbatched(_pick(result, modality))
    sound = _attribute(result, OUTPUTS["audio"]) if modality == "video" else None
    channels_first = tensors and all(isinstance(item, torch.Tensor) for item in main)
    frames = modality == "video" and as_pictures
    return RawOutput(main, [] if sound is None else _unbatched(sound), frames, channels_first)


def media_of(raw: RawOutput) -> list[Media]:
    """The media of an output, all at once."""
    return [to_wire(item if isinstance(item, Image.Image) else finite_array(item)) for item in [*raw.main, *raw.sound]]


def finite_array(item: Any) -> Array:
    """A tensor or an array on the host, half precision as float32. Raises NonFiniteOutputError."""
    array = item.detach().float().cpu().numpy() if isinstance(item, torch.Tensor) else np.asarray(item)
    if not np.isfinite(array).all():
        raise NonFiniteOutputError("the model produced NaN or infinity in its output")
    return array


def _pick(result: Any, modality: Modality) -> Any:
    main = _attribute(result, OUTPUTS[modality])
    if main is None and isinstance(result, tuple) and result:
        main = result[0]
    if main is None:
        raise GenerationError(f"the pipeline returned no {modality}: {type(result).__name__}")
    return main


def _attribute(result: Any, names: tuple[str, ...]) -> Any:
    """The first of the named results. Classic pipelines return output objects, modular ones plain dicts."""
    values = result if isinstance(result, dict) else vars(result) if hasattr(result, "__dict__") else {}
    return next((value for n in names if (value := values.get(n)) is not None), None)


def _unbatched(value: Any) -> list[Any]:
    """Layered models return a list per sample; all else has one item per sample."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        return list(value[0])
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value[i] for i in range(value.shape[0])] if value.shape[0] == 1 else [value]

"""From the media of a request to what pipelines take: pictures, lists of pictures, tensors of samples.

Knows the names of diffusers' arguments, and no particular pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from polymux.diffusion.rates import SoundShape
from polymux.errors import InvalidRequestError
from polymux.families.base import Family
from polymux.media.wire import Array, from_wire
from polymux.request import ArrayData, Media

# Arguments that take sound, as tensors (channels, samples), and what else goes with them.
SOUNDS = ("src_audio", "reference_audio", "initial_audio_waveforms")
BATCHED_SOUNDS = {"initial_audio_waveforms"}  # (1, channels, samples)
RATES = {"initial_audio_waveforms": "initial_audio_sampling_rate"}  # the argument for the samples per second


def media_arguments(media: dict[str, list[Media]], family: Family, sound: SoundShape) -> dict[str, Any]:
    """By the pipeline's names. Raises InvalidRequestError."""
    values: dict[str, Any] = {}
    for name, items in media.items():
        if name in SOUNDS:
            values[name] = _sound(items[0], name, sound)
            if name in RATES:
                values[RATES[name]] = sound.sample_rate
            continue
        made = [_medium(from_wire(item), name, family) for item in items]
        values[name] = made[0] if len(made) == 1 and not name.endswith("s") else made  # images, reference_images
    if isinstance(values.get("mask"), Image.Image) and isinstance(values.get("video"), list):
        values["mask"] = [values["mask"]] * len(values["video"])  # a picture is the mask of every frame
    return values


def _medium(medium: Image.Image | Array, name: str, family: Family) -> Any:
    if isinstance(medium, Image.Image):
        return _picture(medium, name, family)
    if medium.dtype == np.uint8 and medium.ndim == 4:  # frames; pipelines take arrays to be of 0..1
        return [_picture(Image.fromarray(frame), name, family) for frame in medium]
    return medium


def _picture(picture: Image.Image, name: str, family: Family) -> Image.Image:
    """In the mode that pipelines expect."""
    return picture.convert("L" if "mask" in name else "RGBA" if family.alpha else "RGB")


def _sound(item: Media, name: str, wanted: SoundShape) -> torch.Tensor:
    if not isinstance(item, ArrayData) or len(item.shape) != 2 or not item.dtype.startswith("float"):
        raise InvalidRequestError(f"{name}: must be float samples (channels, samples), and their rate", param=name)
    channels, rate = item.shape[0], item.sample_rate
    if rate is None or rate != wanted.sample_rate:
        raise InvalidRequestError(f"{name} has {rate} samples per second: must be {wanted.sample_rate}", param=name)
    if wanted.channels is not None and channels not in (1, wanted.channels):
        raise InvalidRequestError(f"{name} has {channels} channels: must be 1 or {wanted.channels}", param=name)
    samples = torch.from_numpy(np.asarray(from_wire(item), np.float32))
    if wanted.channels is not None and channels == 1:
        samples = samples.expand(wanted.channels, -1)
    return samples[None] if name in BATCHED_SOUNDS else samples

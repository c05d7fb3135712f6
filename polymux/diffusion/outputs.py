"""From a pipeline's result to media.

Pipelines return pictures as PIL or arrays, video as arrays (batch, frames, height, width, channels), sound as
(batch, channels, samples). A session makes one output, so the batch axis goes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from polymux.diffusion.pipeline_call import OUTPUTS
from polymux.errors import GenerationError, NonFiniteOutputError
from polymux.media.wire import to_wire
from polymux.request import Media, Modality

Array = np.ndarray[Any, np.dtype[Any]]


def media_of(result: Any, modality: Modality, as_pictures: bool) -> list[Media]:
    """The media of one output. `as_pictures`: eight bits per channel, as files have them, in place of floats."""
    main = _pick(result, modality)
    media = [_medium(item, modality, as_pictures) for item in _unbatched(main)]
    if modality == "video":
        sound = _attribute(result, OUTPUTS["audio"])
        if sound is not None:
            media += [_medium(item, "audio", False) for item in _unbatched(sound)]
    return media


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


def _medium(item: Any, modality: Modality, as_pictures: bool) -> Media:
    if isinstance(item, Image.Image):
        return to_wire(item)
    array = _array(item)
    if not np.isfinite(array).all():
        raise NonFiniteOutputError("the model produced NaN or infinity in its output")
    if modality == "video" and as_pictures and array.dtype != np.uint8:
        array = (array * 255).round().clip(0, 255).astype(np.uint8)
    return to_wire(array)


def _array(item: Any) -> Array:
    if isinstance(item, torch.Tensor):
        return item.detach().float().cpu().numpy()
    return np.asarray(item)


def sample_rate_of(pipeline: Any) -> int | None:
    """Samples per second of the pipeline's sound, from the config of the component that makes it."""
    for name in ("vocoder", "audio_vae", "vae"):
        config = getattr(pipeline.components.get(name), "config", None)
        for key in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            rate = getattr(config, key, None)
            if isinstance(rate, int):
                return rate
    return None

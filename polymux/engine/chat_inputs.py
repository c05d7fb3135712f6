"""From a request to a question: what it brings, as pictures and arrays in the form that adapters are given."""

from __future__ import annotations

import numpy as np
from PIL import Image

from polymux.conversation import conversation_of, speaks
from polymux.errors import InvalidRequestError
from polymux.families.chat import Film, Question
from polymux.media.audio import Sound, check_samples, resample
from polymux.media.wire import Array, from_wire
from polymux.request import ArrayData, Capabilities, Request, SamplingParams


def question_of(request: Request, params: SamplingParams, capabilities: Capabilities, longest_s: float) -> Question:
    """Raises InvalidRequestError for sound that is none. `longest_s`: of speech."""
    media = request.media
    spoken = speaks(request)
    return Question(
        messages=conversation_of(request),
        params=params,
        bare=not request.messages,
        tools=() if request.tools is None else request.tools.tools,
        pictures=[picture for item in media.get("image", []) if isinstance(picture := from_wire(item), Image.Image)],
        sounds=[_sound(item, capabilities.hears_at) for item in media.get("audio", []) if isinstance(item, ArrayData)],
        films=[Film(frames=np.asarray(from_wire(item)), fps=item.fps) for item in media.get("video", [])
               if isinstance(item, ArrayData)],
        speaks=spoken,
        voice=params.voice or next(iter(capabilities.voices), None) if spoken else None,
        longest_s=longest_s,
    )  # fmt: skip


def _sound(item: ArrayData, rate: int | None) -> Sound:
    """One channel at the model's rate; a sound that does not say its own has that."""
    samples: Array = np.asarray(from_wire(item))
    try:
        samples = _floats(check_samples(samples)).mean(axis=0, keepdims=True)
        own = item.sample_rate or rate or 0
        if rate is not None and own != rate:
            samples = resample(Sound(samples, own), rate)
    except ValueError as error:
        raise InvalidRequestError(f"audio: {error}", param="audio") from None
    return Sound(np.ascontiguousarray(samples, dtype=np.float32), rate or own)


def _floats(samples: Array) -> Array:
    return samples.astype(np.float32) / (32768.0 if samples.dtype == np.int16 else 1.0)

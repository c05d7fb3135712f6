"""Qwen-Omni's thinker as far as its decoder: what pictures, sounds and films are to it, where tokens stand, and what
tells one medium from another.

The thinker's own forward runs, in a copy whose decoder only takes down what it is called with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polymux.errors import GenerationError
from polymux.families.chat import ChatCall, Question, Read
from polymux.families.generate import Parts
from polymux.families.omni_parts import SEEN, for_thinker
from polymux.media.image import flat


class _Reached(Exception):
    """The decoder was called with this."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


def read(parts: Parts, call: ChatCall) -> tuple[ChatCall, Read | None]:
    """`parts` are the caller's own. The call that comes back has no more of the media than that they were there."""
    given = {name: value for name, value in for_thinker(call).items() if hasattr(value, "shape")}
    if not any(name in SEEN for name in given):
        return call, None
    thinker = parts.model.thinker
    ids = given["input_ids"] = given["input_ids"].to(thinker.device)

    def reached(**told: Any) -> None:
        raise _Reached(told)

    thinker.get_decoder().forward = reached
    try:
        thinker(**given, use_audio_in_video=False, use_cache=False)
    except _Reached as told:
        told_with = told.given
    else:
        raise GenerationError("the thinker has read nothing")
    positions = told_with["position_ids"][-3:, 0]
    if bool((positions != positions.round()).any()):
        raise GenerationError("the media stand between whole numbers")
    marks = _marks(parts)
    places = sum(ids[0] == mark for mark in marks.values()).nonzero()[:, 0]
    deep = told_with.get("visual_pos_masks")
    slim = {
        name: value[:0] if name.removeprefix("thinker_") in SEEN else value for name, value in call.arguments.items()
    }
    return replace(call, arguments=slim), Read(
        inputs=told_with["inputs_embeds"][0],
        places=places,
        positions=positions.long(),
        deep_places=None if deep is None else deep[0].nonzero()[:, 0],
        deeper=() if deep is None else told_with["deepstack_visual_embeds"],
    )


def between_numbers(parts: Parts, fps: float) -> str | None:
    """Films whose frames are so many places apart that it is no whole number would stand between tokens."""
    config = parts.model.config.thinker_config
    apart = config.position_id_per_seconds * config.vision_config.temporal_patch_size / fps
    return None if apart == round(apart) else f"the frames of its films stand {apart:g} tokens apart"


def contents(parts: Parts, question: Question) -> Mapping[int, tuple[bytes, ...]]:
    """Digests of what the media hold, by the tokens that stand for them."""
    kinds: dict[str, list[tuple[Any, ...]]] = {
        "image": [(np.asarray(flat(picture).convert("RGB")),) for picture in question.pictures],
        "audio": [(sound.samples, sound.sample_rate) for sound in question.sounds],
        "video": [(film.frames, film.fps) for film in question.films],
    }
    marks = _marks(parts)
    return {marks[kind]: tuple(_digest(*item) for item in items) for kind, items in kinds.items() if items}


def _digest(array: Any, *more: Any) -> bytes:
    digest = hashlib.blake2b(repr((array.shape, array.dtype.str, *more)).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _marks(parts: Parts) -> dict[str, int]:
    """The token that stands for a part of each kind of medium."""
    config = parts.model.config.thinker_config
    return {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}

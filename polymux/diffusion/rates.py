"""How fast what a pipeline makes is played: frames and samples per second, from the configs of its parts.

Nothing is guessed: what no config and no family tells is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polymux.families.base import Family


def fps_of(pipeline: Any, family: Family) -> float | None:
    """Frames per second of the pipeline's videos, unless a request says otherwise."""
    for component, flag, fps in family.other_fps:
        part = pipeline if component == "" else pipeline.components.get(component)
        if part is not None and part.config.get(flag):
            return fps
    return family.fps


@dataclass(frozen=True)
class SoundShape:
    """What sound is to a pipeline. None: its parts do not say."""

    sample_rate: int | None = None  # samples per second
    channels: int | None = None

    @classmethod
    def of(cls, pipeline: Any) -> SoundShape:
        """From the config of the component that makes the sound."""
        return cls(_first(pipeline, _RATE), _first(pipeline, _CHANNELS))


UNKNOWN_SOUND = SoundShape()
_PARTS = ("vocoder", "audio_vae", "vae")
_RATE = ("output_sampling_rate", "sampling_rate", "sample_rate")
_CHANNELS = ("audio_channels",)


def _first(pipeline: Any, keys: tuple[str, ...]) -> int | None:
    """The first integer under one of the keys, in the first part that has one."""
    for name in _PARTS:
        config = getattr(pipeline.components.get(name), "config", None)
        for key in keys:
            value = getattr(config, key, None)
            if isinstance(value, int):
                return value
    return None

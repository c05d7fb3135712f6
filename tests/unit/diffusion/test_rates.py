"""Frames and samples per second come from the configs of a pipeline's parts, and are never guessed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from polymux.diffusion.rates import SoundShape, fps_of
from polymux.families.base import UNKNOWN


def pipeline(config: dict[str, Any] | None = None, **components: Any) -> Any:
    parts = {name: SimpleNamespace(config=config) for name, config in components.items()}
    return SimpleNamespace(components=parts, config=config or {})


def test_the_rate_of_the_sound() -> None:
    vae = SimpleNamespace(sampling_rate=44100, audio_channels=2)
    assert SoundShape.of(pipeline(vae=vae)) == SoundShape(44100, 2)
    vocoder = SimpleNamespace(output_sampling_rate=24000)
    assert SoundShape.of(pipeline(vae=vae, vocoder=vocoder)).sample_rate == 24000
    assert SoundShape.of(pipeline(vae=SimpleNamespace(sample_rate=None))) == SoundShape(None, None)
    assert SoundShape.of(SimpleNamespace(components={"vae": None})).sample_rate is None


def test_the_rate_of_the_frames() -> None:
    family = replace(UNKNOWN, fps=16.0, other_fps=(("", "fast", 24.0), ("transformer", "slow", 8.0)))
    assert fps_of(pipeline(), UNKNOWN) is None
    assert fps_of(pipeline(), family) == 16.0
    assert fps_of(pipeline({"fast": True}), family) == 24.0
    assert fps_of(pipeline({"fast": False}, transformer={"slow": 2}), family) == 8.0
    assert fps_of(pipeline(transformer={"slow": None}), family) == 16.0

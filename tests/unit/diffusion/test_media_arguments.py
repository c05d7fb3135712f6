"""Media in the forms that pipelines take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polymux.diffusion.media_arguments import media_arguments
from polymux.diffusion.rates import SoundShape
from polymux.errors import InvalidRequestError
from polymux.families.base import UNKNOWN
from polymux.media.wire import to_wire

FRAMES = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
MONO = np.linspace(-1, 1, 10, dtype=np.float32)[None]
TAKES = SoundShape(8000, 2)


def made(name: str, *media: Any, rate: int | None = None, takes: SoundShape = TAKES) -> dict[str, Any]:
    return media_arguments({name: [to_wire(medium, sample_rate=rate) for medium in media]}, UNKNOWN, takes)


def test_frames_are_pictures() -> None:
    """Pipelines take arrays to be of 0..1, and bytes would be 255 times too bright."""
    video = made("video", FRAMES)["video"]
    assert all(isinstance(frame, Image.Image) for frame in video)
    assert np.array_equal(np.stack([np.asarray(frame) for frame in video]), FRAMES)
    assert [frame.mode for frame in made("mask", FRAMES)["mask"]] == ["L"] * 3
    floats = FRAMES.astype(np.float32) / 255
    assert np.array_equal(made("video", floats)["video"], floats)


def test_a_picture_is_the_mask_of_every_frame() -> None:
    mask = Image.new("L", (6, 4), 255)
    video = media_arguments({"video": [to_wire(FRAMES)], "mask": [to_wire(mask)]}, UNKNOWN, TAKES)
    assert [np.asarray(frame).tolist() for frame in video["mask"]] == [np.asarray(mask).tolist()] * len(FRAMES)
    alone = media_arguments({"mask": [to_wire(mask)]}, UNKNOWN, TAKES)
    assert isinstance(alone["mask"], Image.Image)


def test_sound_is_a_tensor_with_the_channels_that_the_model_has() -> None:
    for samples in (MONO, MONO.astype(np.float64)):
        sound = made("src_audio", samples, rate=8000)["src_audio"]
        assert isinstance(sound, torch.Tensor) and sound.dtype == torch.float32 and sound.shape == (2, 10)
        assert np.array_equal(sound.numpy(), np.repeat(MONO, 2, axis=0))
    assert made("reference_audio", MONO, rate=8000, takes=SoundShape(8000, 1))["reference_audio"].shape == (1, 10)
    batched = made("initial_audio_waveforms", MONO, rate=8000)
    assert batched["initial_audio_waveforms"].shape == (1, 2, 10) and batched["initial_audio_sampling_rate"] == 8000


@pytest.mark.parametrize(
    ("medium", "rate", "said"),
    [
        (MONO, 16000, "16000 samples per second: must be 8000"),
        (MONO, None, "must be 8000"),
        (np.zeros((3, 10), np.float32), 8000, "3 channels: must be 1 or 2"),
        (MONO[0], 8000, "channels, samples"),
        (np.zeros((1, 10), np.int64), 8000, "channels, samples"),
        (Image.new("RGB", (4, 4)), None, "channels, samples"),
    ],
)
def test_other_sound_is_refused(medium: Any, rate: int | None, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        made("src_audio", medium, rate=rate)
    assert caught.value.param == "src_audio"

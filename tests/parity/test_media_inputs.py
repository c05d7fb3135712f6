"""Input videos, masks, last pictures and sound do what they do in diffusers' own call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polymux.config import EngineConfig
from polymux.diffusion.pipeline_call import MEDIA
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import InvalidRequestError
from polymux.loading import load_pipeline
from polymux.omni_output import output_of
from polymux.prompts import request_of
from polymux.request import Event, Finished, OmniDiffusionSamplingParams
from polymux.testing.tiny import TINY

from .reference import NAMES, distance, reference

RANDOM = np.random.default_rng(0)
PICTURES = [Image.fromarray(RANDOM.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(5)]
MASKS = [Image.new("L", (32, 32), 255 if i % 2 else 0) for i in range(5)]


def sound(rate: int, channels: int = 2) -> np.ndarray[Any, Any]:
    return RANDOM.uniform(-0.5, 0.5, (channels, rate // 2)).astype(np.float32)


MUSIC, MONO = sound(4800), sound(44100, 1)[:, :600]

# A pipeline, what a user gives, and the same in diffusers' own call.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("wan21-vace", {"video": PICTURES, "mask": MASKS}, {"video": PICTURES, "mask": MASKS}),
    ("wan21-vace", {"video": np.stack(PICTURES)}, {"video": PICTURES}),
    ("wan21-vace", {"reference_images": PICTURES[:2]}, {"reference_images": PICTURES[:2]}),
    (
        "wan22-i2v-moe",
        {"image": PICTURES[0], "last_image": PICTURES[1]},
        {"image": PICTURES[0], "last_image": PICTURES[1]},
    ),
    ("cosmos25-predict", {"video": PICTURES}, {"video": PICTURES}),
    ("acestep", {"reference_audio": (MUSIC, 4800)}, {"reference_audio": torch.from_numpy(MUSIC)}),
    ("acestep", {"src_audio": (MUSIC, 4800)}, {"src_audio": torch.from_numpy(MUSIC)}),
    (
        "stable-audio",
        {"initial_audio_waveforms": (MONO, 44100)},
        {"initial_audio_waveforms": torch.from_numpy(MONO)[None], "initial_audio_sampling_rate": 44100},
    ),
]


@pytest.mark.parametrize(("name", "given", "own"), CASES, ids=lambda value: "-".join(value)[:30])
def test_media(name: str, given: dict[str, Any], own: dict[str, Any], tiny_checkpoint: Callable[..., Path]) -> None:
    spec = TINY[name]
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)), max_num_seqs=1)
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(spec.load))
    call = {k: v for k, v in spec.call.items() if k not in (*MEDIA, *own)} | {"num_inference_steps": 2}
    output_type = "latent" if name.startswith("cosmos") else "np"  # see EIGHT_BITS in test_families
    without = reference(pipeline, call, 1, output_type) if "image" not in own else None
    if "src_audio" in own:
        del call["audio_duration"]  # it is as long as what it is made of
    wanted = reference(pipeline, call | own, 1, output_type)
    assert without is None or not all(map(np.array_equal, wanted, without)), "the media make a difference"

    fields = {NAMES.get(k, k): v for k, v in call.items() if k != "prompt"}
    known = OmniDiffusionSamplingParams.__dataclass_fields__
    extra = {k: v for k, v in fields.items() if k not in known}
    params = OmniDiffusionSamplingParams(
        **{k: v for k, v in fields.items() if k in known}, seed=1, output_type=output_type, extra_args=extra
    )
    asked = request_of({"prompt": call["prompt"], "multi_modal_data": given}, params, "a")
    engine = DiffusionEngine(config, pipeline, torch.device("cpu"))
    engine.add(asked)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    engine.close()
    event = events[-1]
    assert isinstance(event, Finished), event
    output = output_of(asked, event)
    assert distance([*output.videos, *output.audio, *output.latents], wanted) == 0.0


@pytest.mark.parametrize("name", ["wan22-ti2v-i2v", "wan21-i2v"])
def test_a_last_picture_that_the_checkpoint_cannot_use_is_refused(
    name: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    engine = DiffusionEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint(name)), max_num_seqs=1))
    assert engine.capabilities.media == {"image": 1}
    media = {"image": PICTURES[0], "last_image": PICTURES[1]}
    with pytest.raises(InvalidRequestError, match="last_image: this checkpoint's") as caught:
        engine.add(request_of({"prompt": "a", "multi_modal_data": media}, None, "a"))
    assert caught.value.param == "last_image"
    engine.close()

"""Pictures of as many tokens but of another shape side by side: each keeps its own positions.

A denoiser may merge such requests only if it takes every sample's positions from its own arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import load_pipeline
from polymux.testing.tiny import TINY, names

from .reference import reference, request, takes_steps
from .test_families import EIGHT_BITS, TOLERANCE, arrays, distance, drive

# Their pipelines take no size, or no other one.
FIXED = {
    "acestep",
    "hidream-i1",
    "hunyuan-video15-i2v",
    "longcat-audiodit",
    "sd15-img2img",
    "sdxl-img2img",
    "stable-audio",
}

# They choose the size themselves.
CHOOSING = {"qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "longcat-image-edit", "kandinsky5-t2i"}


@pytest.mark.parametrize("name", [n for n in (*names("diffusers"), *names("modular")) if n not in {*FIXED, *CHOOSING}])
def test_upright_and_lying(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    spec = TINY[name]
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)))
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(spec.load))
    output_type = "latent" if name in EIGHT_BITS else "np"
    side = spec.call.get("height", 64)
    call = dict(spec.call) | ({"num_inference_steps": 2} if takes_steps(pipeline) else {})
    calls = [call | {"height": side, "width": 2 * side}, call | {"height": 2 * side, "width": side}]
    if "max_area" in call:  # what the engine makes of height and width
        calls = [c | {"max_area": c["height"] * c["width"]} for c in calls]
    wanted = [reference(pipeline, call, seed, output_type) for seed, call in enumerate(calls)]

    engine = DiffusionEngine(EngineConfig.from_flat(model=name), pipeline, torch.device("cpu"))
    for seed, call in enumerate(calls):
        engine.add(request(call, str(seed), seed, output_type))
    done = drive(engine)
    for seed, want in enumerate(wanted):
        assert distance(arrays(done[str(seed)]), want) <= TOLERANCE
    assert not engine.runner.unmergeable
    engine.close()

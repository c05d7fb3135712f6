"""Previews of every family that says it makes them: they leave the picture alone, and lead to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.preview import Watch, preview_steps
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.families import family_of
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, Media, Preview, Request
from polymux.testing.tiny import TINY, names

from .reference import request, takes_steps

STEPS = 4
NONE = {"glm-image"}  # it makes none
_CHOOSING = {"qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "longcat-image-edit", "kandinsky5-t2i"}
LARGE = _CHOOSING | {"hidream-i1"}  # their pictures have a megapixel, of which three previews take long on a CPU


def load(name: str, tiny_checkpoint: Callable[..., Path]) -> Any:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)))
    return load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(TINY[name].load))


def run(engine: DiffusionEngine, wanted: Request) -> list[Event]:
    engine.add(wanted)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
        for job in engine.jobs.values():
            for session in job.sessions.values():
                if isinstance(session.tap, Watch):  # after the last step too, where nothing is left to guess
                    session.tap.plan = lambda total, count: preview_steps(total, count) | {total}
    return [event for event in events if isinstance(event, (Preview, Finished))]


def picture(media: list[Media]) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(from_wire(medium)) for medium in media]).astype(int)


def makes_pictures(checkpoint: Path) -> bool:
    index = next(path for n in ("model_index.json", "modular_model_index.json") if (path := checkpoint / n).exists())
    return family_of(json.loads(index.read_text())["_class_name"]).modality == "image"


@pytest.mark.parametrize("name", sorted({*names("diffusers"), *names("modular")} - LARGE - NONE))
def test_family(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    if not makes_pictures(tiny_checkpoint(name)):
        pytest.skip("makes no pictures")
    pipeline = load(name, tiny_checkpoint)
    flat = EngineConfig.from_flat(model=name, max_num_seqs=1, prompt_cache_gib=0.0)  # each run encodes again
    engine = DiffusionEngine(flat, pipeline, torch.device("cpu"))
    assert engine.capabilities.previews
    call = dict(TINY[name].call)
    if takes_steps(pipeline):
        call["num_inference_steps"] = STEPS
    wanted = request(call, "a", 1, "pil")
    (plain,) = run(engine, wanted)
    once = work(engine)
    *previews, last, final = run(engine, msgspec.structs.replace(wanted, partial_images=3))
    assert isinstance(plain, Finished) and isinstance(final, Finished) and isinstance(last, Preview)
    assert [p.step for p in previews if isinstance(p, Preview)] == sorted(preview_steps(final.metrics.steps, 3))
    assert previews
    assert np.array_equal(picture(final.outputs[0]), picture(plain.outputs[0]))
    assert np.array_equal(picture(last.media), picture(final.outputs[0]))
    assert work(engine) == {name: 2 * calls for name, calls in once.items()}, "previews only decode"
    engine.close()


def work(engine: DiffusionEngine) -> dict[str, int]:
    decoders = {c.name for c in engine.components if c.role == "decoder"}
    return {name: calls for name, calls in engine.stats.calls.items() if name not in decoders}


def test_a_preview_is_what_is_left_when_the_noise_is_taken_away(tiny_checkpoint: Callable[..., Path]) -> None:
    """Against diffusers alone: the latents of each step tell how the model moved, and so where it was heading."""
    pipeline = load("flux-dev", tiny_checkpoint)
    call = dict(TINY["flux-dev"].call) | {"num_inference_steps": STEPS}
    latents: list[torch.Tensor] = []

    def note(pipe: Any, step: int, timestep: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents.append(values["latents"])
        return values

    own = type(pipeline)(**pipeline.components)
    own(**call, generator=torch.Generator().manual_seed(1), output_type="latent", callback_on_step_end=note)
    sigmas = own.scheduler.sigmas
    before, after = latents[0], latents[1]  # the second step
    velocity = (after - before) / (sigmas[2] - sigmas[1])
    clean = own._unpack_latents(before - sigmas[1] * velocity, call["height"], call["width"], own.vae_scale_factor)
    with torch.no_grad():
        pixels = own.vae.decode(clean / own.vae.config.scaling_factor + own.vae.config.shift_factor).sample
    (expected,) = own.image_processor.postprocess(pixels, output_type="pil")

    engine = DiffusionEngine(EngineConfig.from_flat(model="flux-dev", max_num_seqs=1), pipeline, torch.device("cpu"))
    _, second, *_ = run(engine, msgspec.structs.replace(request(call, "a", 1, "pil"), partial_images=3))
    assert isinstance(second, Preview) and second.step == 2
    assert np.abs(picture(second.media)[0] - np.asarray(expected).astype(int)).max() <= 1
    engine.close()

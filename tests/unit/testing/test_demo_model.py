"""The embedded model: small, a plain diffusers checkpoint, and what it paints is what was asked for."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, LoRARequest, OmniDiffusionSamplingParams, Request
from training.evaluate import painter
from training.export import load
from training.parse import Parser

DEMO_MODEL = Path(str(resources.files("polymux") / "demo_model"))
ASKED = {
    ("circle", "red"): "a red circle on a white background",
    ("triangle", "green"): "a large green triangle on a cream background",
    ("diamond", "blue"): "a blue diamond on a light green background",
}


@pytest.fixture(scope="module")
def pipe() -> diffusers.QwenImagePipeline:
    return load(DEMO_MODEL)


def test_is_small_and_complete() -> None:
    sizes = {p.relative_to(DEMO_MODEL): p.stat().st_size for p in DEMO_MODEL.rglob("*") if p.is_file()}
    assert Path("model_index.json") in sizes
    assert sum(sizes.values()) <= 20_000_000


def test_is_a_plain_checkpoint(pipe: diffusers.QwenImagePipeline) -> None:
    assert {type(c).__module__.split(".")[0] for c in pipe.components.values()} == {"diffusers", "transformers"}
    assert not any("processor" in name for name in pipe.components)  # these need torchvision


def test_pictures_show_what_was_asked_for(pipe: diffusers.QwenImagePipeline) -> None:
    pictures = painter(pipe, 10, len(ASKED))(list(ASKED.values()), (128, 128), 3.0, 1)
    found = [[(piece.shape, piece.colour) for piece in pieces] for pieces in Parser()(pictures)]
    assert found == [[wanted] for wanted in ASKED]


def test_seeds_and_other_sizes(pipe: diffusers.QwenImagePipeline) -> None:
    def paint(seed: int) -> torch.Tensor:
        return painter(pipe, 2, 1)(["a red circle"], (160, 96), 1.0, seed)[0]

    assert paint(1).shape == (3, 96, 160)
    assert torch.equal(paint(1), paint(1))
    assert float((paint(1) - paint(2)).abs().mean()) > 0.01


def test_the_adapter_draws_outlines() -> None:
    """Through the engine, where a request names it, and another one does not."""
    prompt = "a large blue circle in the center on a white background"
    sampling: dict[str, Any] = {"height": 128, "width": 128, "num_inference_steps": 8, "seed": 1}
    sampling |= {"true_cfg_scale": 3.0, "negative_prompt": " ", "output_type": "np"}
    adapter = LoRARequest(path=str(DEMO_MODEL.parent / "demo_lora" / "outline.safetensors"))
    engine = DiffusionEngine.load(EngineConfig.from_flat(model="demo", warmup=False, device="cpu"))
    try:
        for name, lora in (("plain", ()), ("outline", (adapter,))):
            params = OmniDiffusionSamplingParams(lora=lora, **sampling)
            engine.add(Request(request_id=name, prompt=prompt, params=params))
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
            engine.taken("plain")
            engine.taken("outline")
        made = {
            e.request_id: from_wire(e.outputs[0][0]).reshape(128, 128, 3) for e in events if isinstance(e, Finished)
        }
    finally:
        engine.close()
    middle = {name: picture[60:68, 60:68].mean(axis=(0, 1)) for name, picture in made.items()}
    assert middle["plain"][0] < 0.5 < middle["plain"][2]  # blue
    assert middle["outline"].min() > 0.85  # white, as the background
    assert made["outline"].min() < 0.5  # and there is something around it

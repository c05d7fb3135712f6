"""The embedded model: small, a plain diffusers checkpoint, and what it paints is what was asked for."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import diffusers
import pytest
import torch

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

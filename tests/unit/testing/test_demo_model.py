"""The embedded model: small, reproducible, and a plain diffusers checkpoint."""

from __future__ import annotations

import filecmp
from pathlib import Path

import diffusers
import torch

from polymux.testing.make_demo import DEMO_MODEL, make_demo


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_is_small_and_complete() -> None:
    assert "model_index.json" in files(DEMO_MODEL)
    assert sum((DEMO_MODEL / name).stat().st_size for name in files(DEMO_MODEL)) <= 1_000_000


def test_committed_files_are_what_the_script_makes(tmp_path: Path) -> None:
    made = make_demo(tmp_path / "demo")
    assert files(made) == files(DEMO_MODEL)
    same, different, errors = filecmp.cmpfiles(made, DEMO_MODEL, files(made), shallow=False)
    assert (sorted(same), different, errors) == (files(made), [], [])


def test_plain_diffusers_makes_a_picture_that_follows_seed_and_prompt() -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(DEMO_MODEL, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    assert {type(c).__module__.split(".")[0] for c in pipe.components.values()} == {"diffusers", "transformers"}
    assert not any("processor" in name for name in pipe.components)  # these need torchvision

    def paint(prompt: str, seed: int) -> torch.Tensor:
        result = pipe(
            prompt,
            width=256,
            height=256,
            num_inference_steps=4,
            output_type="pt",
            generator=torch.Generator().manual_seed(seed),
        )
        image: torch.Tensor = result.images[0]
        return image

    base = paint("a red cat", 1)
    assert base.shape == (3, 256, 256)
    assert torch.isfinite(base).all()
    assert float(base.std()) > 0.05
    assert float((paint("a red cat", 2) - base).abs().mean()) > 0.01
    assert float((paint("a blue dog", 1) - base).abs().max()) > 0.01

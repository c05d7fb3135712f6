"""Training computes what plain diffusers computes, and what it saves opens in plain diffusers."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from training import check, components, evaluate, export, stage_flow
from training.run import Pace


def test_fast_forwards_equal_the_libraries() -> None:
    assert check.differences().worst() < 1e-4


def test_saved_pipeline_opens_and_paints_and_the_archive_holds_it(tmp_path: Path) -> None:
    pipe = check.random_pipeline()
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    export.save(pipe, tmp_path / "model")
    assert all(torch.equal(before[name], value) for name, value in pipe.transformer.state_dict().items())
    again = export.load(tmp_path / "model")
    pictures = evaluate.painter(again, 2, 2)(["a red circle", "a cat, 2"], (96, 160), 3.0, 0)
    assert pictures.shape == (2, 3, 160, 96)
    assert torch.isfinite(pictures).all()
    for name in ("a.tar.xz", "b.tar.xz"):
        export.archive(tmp_path / "model", tmp_path / name)
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.xz") as tar:
        assert "demo_model/model_index.json" in tar.getnames()


def test_the_pipeline_integrates_the_velocity_that_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exact velocity towards one picture, noise minus picture, the pipeline's steps end in that picture."""
    pipe = check.random_pipeline()
    pipe.set_progress_bar_config(disable=True)
    picture = torch.randn(1, 64, 4 * check.TINY.channels)

    def exact(hidden_states: torch.Tensor, timestep: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        noise = picture + (hidden_states - picture) / timestep[:, None, None]
        return (noise - picture,)

    monkeypatch.setattr(pipe.transformer, "forward", exact)
    end = pipe("a red circle", width=128, height=128, num_inference_steps=5, output_type="latent").images
    assert torch.allclose(end, picture, atol=1e-4)


def test_noise_levels_have_the_schedulers_shift() -> None:
    levels = stage_flow.noise_levels(4000, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert 0 < float(levels.min()) < float(levels.max()) < 1
    middle = components.scheduler().shift / (1 + components.scheduler().shift)
    assert abs(float(levels.median()) - middle) < 0.02


def test_the_shipped_sizes_stay_below_twenty_megabytes() -> None:
    pipe = components.pipeline(components.Sizes(), 0)
    modules = (pipe.vae, pipe.text_encoder, pipe.transformer)
    assert sum(2 * p.numel() for m in modules for p in m.parameters()) < 20e6


def test_unused_frames_of_the_autoencoder_are_zero() -> None:
    vae = components.vae(components.Sizes())
    kernels = [m.weight for m in vae.modules() if isinstance(m, torch.nn.Conv3d) and m.kernel_size[0] == 3]
    assert kernels
    assert all(float(k.detach()[:, :, :-1].abs().max()) == 0 for k in kernels)


def test_pace_by_steps_takes_that_many_and_lowers_the_rate() -> None:
    pace = Pace(seconds=0.0, steps=40)
    rates = [pace.rate(1.0, warmup=5) for _ in pace]
    assert len(rates) == 40
    assert rates[0] < rates[10] == 1.0
    assert rates[-1] < 0.05

"""Training computes what plain diffusers computes, and what it saves opens in plain diffusers."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from training import check, checkpoint, components, evaluate, export, fast, pool, stage_flow, stage_vae
from training.optim import Optimizer, orthogonalized
from training.run import Pace, Run
from training.sampling import Sampler


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
    torch.manual_seed(0)
    levels = stage_flow.noise_levels(4000, torch.device("cpu"))
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


def test_the_sampler_of_training_paints_what_the_pipeline_paints(tmp_path: Path) -> None:
    pipe = check.random_pipeline()
    pipe.set_progress_bar_config(disable=True)
    texts, noise = ["a red circle", "two small green letters A, top left"], torch.randn(2, 60, 32)
    wanted = pipe(
        texts, negative_prompt=[" ", " "], true_cfg_scale=3.0, width=160, height=96, num_inference_steps=3,
        latents=noise, output_type="pt",
    ).images  # fmt: skip
    found = Sampler(pipe, Run(tmp_path, torch.device("cpu"), 0), steps=3)(texts, 1, noise)
    assert torch.allclose(wanted, found, atol=1e-3)


def test_kernels_trained_flat_are_stored_in_the_autoencoder() -> None:
    vae = components.vae(check.TINY)
    still = fast.StillVAE(vae)
    with torch.no_grad():
        for kernel in still.kernels.values():
            kernel.mul_(0.5)
    before = still.encode(pictures := torch.rand(1, 3, 32, 32))[0]
    assert not torch.allclose(before, fast.StillVAE(vae).encode(pictures)[0], atol=1e-4)
    still.store()
    assert torch.allclose(before, vae.encode(pictures[:, :, None]).latent_dist.mean[:, :, 0], atol=1e-5)


def test_updates_of_matrices_are_nearly_orthogonal_and_the_loss_falls() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(3, 40, 24)))
    assert 0.5 < float(values.min()) < float(values.max()) < 1.5
    layer, x = torch.nn.Linear(8, 8), torch.randn(64, 8)
    wanted = x @ torch.randn(8, 8)
    optimizer, losses = Optimizer([layer.weight], [layer.bias]), []
    optimizer.set_rate(0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - wanted).square().mean()
        loss.backward()
        optimizer.clip(10.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_a_run_goes_on_from_what_an_earlier_one_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, torch.device("cpu"), 0)
    first, second = check.random_pipeline(seed=1), check.random_pipeline(seed=2)
    checkpoint.round_off(first.vae)
    checkpoint.round_off(first.text_encoder)
    first.vae.register_to_config(latents_mean=[0.5] * 8)
    assert checkpoint.load_parts(second, run, tmp_path) == set()
    assert checkpoint.load_flow(second, run, tmp_path) == 0
    checkpoint.save_parts(first, run, ("vae",))
    assert checkpoint.load_parts(second, run, tmp_path) == {"vae"}
    checkpoint.save_parts(first, run)
    checkpoint.save_flow(first, run, 70)
    assert checkpoint.load_parts(second, run, tmp_path) == {"vae", "text_encoder"}
    assert checkpoint.load_flow(second, run, tmp_path) == 70
    assert second.vae.config.latents_mean == [0.5] * 8
    for name in ("vae", "text_encoder", "transformer"):
        ours, theirs = first.components[name].state_dict(), second.components[name].state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    halves = [(tmp_path / f"flow-{half}.pt").stat().st_size for half in (0, 1)]
    assert max(halves) < 1.2 * min(halves)


@pytest.mark.parametrize("decoder_only", [True, False])
def test_an_autoencoder_goes_on_and_its_decoder_alone_leaves_latents_as_they_are(
    tmp_path: Path, decoder_only: bool
) -> None:
    vae, picture = components.vae(check.TINY), torch.rand(1, 3, 1, 32, 32)
    with torch.no_grad():
        latents = vae.encode(picture).latent_dist.mean
        before = vae.decode(latents).sample
    scenes = pool.build(10, 1, ("<|im_start|>user\n", "<|im_end|>\n"))
    plan = stage_vae.Plan(batch=2, rate=0.01, decoder_only=decoder_only)
    stage_vae.train(vae, scenes, Run(tmp_path, torch.device("cpu"), 0), Pace(0.0, steps=2), plan)
    with torch.no_grad():
        assert torch.allclose(vae.encode(picture).latent_dist.mean, latents, atol=1e-5) == decoder_only
        assert not torch.equal(vae.decode(latents).sample, before)
    assert all(p.requires_grad for p in vae.parameters())

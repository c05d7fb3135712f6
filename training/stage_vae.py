"""First stage: the autoencoder learns to draw the scenes, then turns all of them into latents.

It learns on crops of a quarter of a picture, which are cheaper and hold less background, and for the last part of the
time on whole ones. Pictures are rendered beforehand, as bytes on the device. A finished one may go on learning: all of
it, which changes the latents, or its decoder alone, which does not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import diffusers as D
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training import fast, render
from training.captured import Repeated
from training.optim import Optimizer
from training.pool import Pool
from training.run import Pace, Run
from training.scenes import CANVASES

PEAK_RATE = 3e-3
LATER_RATE = 1e-3  # of an autoencoder that goes on
KL = 3e-4
EDGES = 0.5
SQUARES = 2.0
REGIONS = 1.0  # mean colours of squares of REGION pixels
REGION = 4
CROP = 64
WHOLE = 0.25  # share of the time that goes to whole pictures
CELL = 16  # pixels of a picture for each token of the denoiser


@dataclass
class Painter:
    """Renders pool records on the device. Not compiled: that took longer than it ever saved."""

    run: Run
    outline: bool = False

    def __post_init__(self) -> None:
        self.strokes = render.letter_strokes(self.run.device)

    @torch.no_grad()
    def __call__(self, records: Tensor, width: int, height: int) -> Tensor:
        """Pictures in -1..1."""
        pictures = render.render(records, self.strokes, width, height, self.outline)
        return (pictures * 2 - 1).contiguous(memory_format=torch.channels_last)

    def bank(self, records: Tensor, width: int, height: int) -> Tensor:
        """Pictures as bytes."""
        parts = [(self(part, width, height) * 127.5 + 127.5).round().byte() for part in records.split(500)]
        return torch.cat(parts)


def still_vae(vae: D.AutoencoderKLQwenImage, run: Run) -> fast.StillVAE:
    still = fast.StillVAE(vae)
    still.norm_act = run.compile(fast.norm_act, dynamic=True)
    still.joined = run.compile(fast.joined, dynamic=True)
    return still


def _edges(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]


def _loss(vae: fast.StillVAE, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the mean squared error, absolute error and divergence in it."""
    mean, log_variance = vae.encode(pictures)
    found = vae.decode(mean + (0.5 * log_variance).exp() * torch.randn_like(mean)).float()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    edges = sum(F.l1_loss(a, b) for a, b in zip(_edges(found), _edges(pictures), strict=True))
    plain = F.l1_loss(found, pictures)
    squares = F.mse_loss(found, pictures)  # alone, absolute errors leave small things out for long
    regions = F.avg_pool2d(found - pictures, REGION).abs().mean()
    loss = plain + SQUARES * squares + EDGES * edges + REGIONS * regions + KL * kl
    return loss, torch.stack([squares, plain, kl]).detach()


def _banks(pool: Pool, run: Run) -> tuple[Tensor, Tensor]:
    """Crops around the first thing of each scene, and whole pictures."""
    painter, (width, height) = Painter(run), CANVASES[0]
    records = torch.from_numpy(pool.records[pool.canvas == 0]).to(run.device)
    spread = (torch.rand(len(records), 2, device=run.device) - 0.5) * CROP
    corner = (records[:, 1:3] - CROP / 2 + spread).round().clamp(0, height - CROP)
    crops = painter.bank(render.cropped(records, corner, height, CROP), CROP, CROP)
    return crops, painter.bank(records[: len(records) // 4], width, height)


@dataclass(frozen=True)
class Plan:
    """`batch` crops a step, or as many pixels of whole pictures."""

    batch: int
    rate: float = PEAK_RATE
    decoder_only: bool = False


@contextlib.contextmanager
def _learning(still: fast.StillVAE, decoder_only: bool) -> Iterator[Optimizer]:
    """The optimizer of what learns; what does not has no gradients meanwhile."""
    learns = still.of_decoder() if decoder_only else {*still.hidden, *still.others}
    frozen = [p for p in [*still.hidden, *still.others] if p not in learns]
    for p in frozen:
        p.requires_grad_(False)
    yield Optimizer([p for p in still.hidden if p in learns], [p for p in still.others if p in learns])
    for p in frozen:
        p.requires_grad_(True)


def train(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, pace: Pace, plan: Plan) -> None:
    """Trains in place."""
    run.reseed(1)
    crops, whole = _banks(pool, run)
    run.log(f"vae: {len(crops)} crops, {len(whole)} pictures rendered")
    still = still_vae(vae, run)
    with _learning(still, plan.decoder_only) as optimizer:
        _steps(still, (crops, whole), run, pace, (plan, optimizer))
    still.store()
    run.log(f"vae done: {pace.step} steps of {plan.batch} crops in {pace.spent():.0f} s")


def _steps(
    still: fast.StillVAE, banks: tuple[Tensor, Tensor], run: Run, pace: Pace, how: tuple[Plan, Optimizer]
) -> None:
    plan, optimizer = how

    def step_on(bank: Tensor, number: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            rows = torch.randint(len(bank), (number,), device=run.device)
            pictures = (bank[rows].float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with run.autocast():
                loss, told = _loss(still, pictures)
            loss.backward()
            optimizer.clip(1.0)
            optimizer.step()
            return told

        return step

    on_crops = Repeated("vae, crops", step_on(banks[0], plan.batch), run)
    on_whole = Repeated("vae, whole pictures", step_on(banks[1], max(1, plan.batch // 4)), run)
    optimizer.set_rate(0.0)
    on_crops.prepare()
    on_whole.prepare()
    pace.restart()
    clock, counted = time.monotonic(), 0
    for step in pace:
        repeated = on_crops if pace.progress() < 1 - WHOLE else on_whole
        optimizer.set_rate(pace.rate(plan.rate, warmup=100))
        told = repeated()
        if step % 50 == 0:
            squares, plain, kl = told.tolist()
            run.note("vae dB", step, -10 * float(np.log10(squares / 4)))
            if step % 500 == 0:
                speed = (step - counted) / (time.monotonic() - clock)
                clock, counted = time.monotonic(), step
                run.log(
                    f"vae step {step} {-10 * np.log10(squares / 4):.1f} dB, L1 {plain:.4f}, KL {kl:.2f}, "
                    f"{speed:.1f} steps/s, {pace.progress():.0%}"
                )
    run.profile("vae", on_crops)
    run.profile("vae, whole", on_whole)


@torch.no_grad()
def measure(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, number: int = 4000) -> None:
    """Write the latents' mean and deviation per channel into the autoencoder's config, for the pipeline to read."""
    records = torch.from_numpy(pool.records[pool.canvas == 0][:number]).to(run.device)
    still, painter = fast.StillVAE(vae), Painter(run)
    with run.autocast():
        latents = torch.cat([still.encode(painter(part, *CANVASES[0]))[0] for part in records.split(500)])
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(
        latents_mean=[round(float(m), 6) for m in mean], latents_std=[round(float(d), 6) for d in deviation]
    )
    run.log(f"deviations of the latents: {[round(float(d), 2) for d in deviation]}")


@torch.no_grad()
def to_latents(
    vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, outline: bool = False, chunk: int = 500
) -> tuple[Tensor, Tensor]:
    """All scenes as packed latents (scenes, tokens, channels) of unit variance, and what their tokens show
    (scenes, tokens, 3), as `render.token_labels` has it; short ones are padded with zeros."""
    still, painter = still_vae(vae, run), Painter(run, outline)
    mean = torch.tensor(vae.config.latents_mean, device=run.device)[:, None, None]
    deviation = torch.tensor(vae.config.latents_std, device=run.device)[:, None, None]
    store = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    tokens = max(w * h for w, h in CANVASES) // CELL**2
    result = torch.zeros(len(pool.canvas), tokens, 4 * vae.config.z_dim, device=run.device, dtype=store)
    shown = torch.zeros(len(pool.canvas), tokens, 3, device=run.device, dtype=torch.int8)
    begin = 0
    for canvas, (width, height) in enumerate(CANVASES):
        records = torch.from_numpy(pool.records[pool.canvas == canvas]).to(run.device)
        for part in records.split(chunk):
            with run.autocast():
                latents = still.encode(painter(part, width, height))[0]
            packed = fast.pack(((latents - mean) / deviation).contiguous())
            rows = slice(begin, begin + len(part))
            result[rows, : packed.shape[1]] = packed.to(store)
            labels = render.token_labels(part, painter.strokes, width, height, CELL)
            shown[rows, : packed.shape[1]] = labels.to(torch.int8)
            begin += len(part)
    run.log(f"latents of {begin} scenes")
    return result, shown


@torch.no_grad()
def fidelity(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, number: int = 100) -> tuple[dict[str, float], Tensor]:
    """Peak signal-to-noise ratio per canvas in fp32, and some pictures above their reconstructions."""
    still, painter = fast.StillVAE(vae), Painter(run)
    found, shown = {}, []
    for canvas, (width, height) in enumerate(CANVASES):
        records = torch.from_numpy(pool.records[pool.canvas == canvas][:number]).to(run.device)
        pictures = painter(records, width, height)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False):  # trying ways to convolve takes longer
            again = still.decode(still.encode(pictures)[0]).clamp(-1, 1)
        error = float(((pictures - again) / 2).square().mean())
        found[f"{width}x{height}"] = round(-10 * float(torch.tensor(error).log10()), 2)
        if canvas == 0:
            shown = [pictures[:8], again[:8]]
    run.log(f"vae PSNR in dB: {found}")
    return found, torch.cat(shown) / 2 + 0.5

"""First stage: the autoencoder learns to draw the scenes, then turns all of them into latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import diffusers as D
import torch
import torch.nn.functional as F
from torch import Tensor

from training import fast, render
from training.pool import Pool
from training.run import Pace, Run, adamw, set_rate
from training.scenes import CANVASES

PEAK_RATE = 1.5e-3
KL = 3e-4
EDGES = 0.5
SQUARES = 2.0


@dataclass
class Painter:
    """Renders pool records on the device; one compiled kernel for square pictures."""

    run: Run
    outline: bool = False

    def __post_init__(self) -> None:
        self.strokes = render.letter_strokes(self.run.device)
        self.square: Callable[..., Tensor] = render.render
        if self.run.compiled:
            self.square = torch.compile(render.render, dynamic=False)

    def __call__(self, records: Tensor, canvas: int, compiled: bool = False) -> Tensor:
        """Pictures in -1..1."""
        paint = self.square if compiled else render.render
        pictures = paint(records, self.strokes, *CANVASES[canvas], self.outline)
        return (pictures * 2 - 1).contiguous(memory_format=torch.channels_last)


def still_vae(vae: D.AutoencoderKLQwenImage, run: Run) -> fast.StillVAE:
    if run.compiled:
        return fast.StillVAE(vae, torch.compile(fast.norm_act, dynamic=True))
    return fast.StillVAE(vae)


def _edges(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]


def _loss(vae: fast.StillVAE, pictures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_variance = vae.encode(pictures)
    found = vae.decode(mean + (0.5 * log_variance).exp() * noise).float()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    edges = sum(F.l1_loss(a, b) for a, b in zip(_edges(found), _edges(pictures), strict=True))
    plain = F.l1_loss(found, pictures)
    squares = F.mse_loss(found, pictures)  # alone, absolute errors leave small things out for long
    return plain + SQUARES * squares + EDGES * edges + KL * kl, plain.detach()


def train(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, pace: Pace, batch: int) -> None:
    """Trains in place. A checkpoint named `vae` is resumed from, and written about every half minute."""
    still, painter, generator = still_vae(vae, run), Painter(run), run.generator(1)
    records = torch.from_numpy(pool.records[pool.canvas == 0]).to(run.device)
    optimizer = adamw((p for n, p in vae.named_parameters() if "time_conv" not in n), run.device)
    state = run.load("vae")
    if state is not None:
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        pace.step, pace.before = state["step"], state["spent"]
    height, width = CANVASES[0][1] // 8, CANVASES[0][0] // 8
    saved = run.elapsed()
    for step in pace:
        index = torch.randint(len(records), (batch,), device=run.device, generator=generator)
        pictures = painter(records[index], 0, compiled=True)
        noise = torch.randn(batch, vae.config.z_dim, height, width, device=run.device, generator=generator)
        with run.autocast():
            loss, plain = _loss(still, pictures, noise)
        set_rate(optimizer, pace.rate(PEAK_RATE))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            run.note("vae L1", step, float(plain))
        if step % 500 == 0:
            run.log(f"vae step {step} L1 {float(plain):.4f} {pace.progress():.0%}")
        if run.elapsed() - saved > 30:
            saved = run.elapsed()
            _save(vae, optimizer, run, pace)
    _save(vae, optimizer, run, pace)
    run.log(f"vae done: {pace.step} steps of {batch} in {pace.spent():.0f} s")


def _save(vae: D.AutoencoderKLQwenImage, optimizer: torch.optim.Optimizer, run: Run, pace: Pace) -> None:
    state = {"model": vae.state_dict(), "optimizer": optimizer.state_dict()}
    run.save("vae", {**state, "step": pace.step + 1, "spent": pace.spent()})


@torch.no_grad()
def measure(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, number: int = 4000) -> None:
    """Write the latents' mean and deviation per channel into the autoencoder's config, for the pipeline to read."""
    records = torch.from_numpy(pool.records[pool.canvas == 0][:number]).to(run.device)
    still, painter = still_vae(vae, run), Painter(run)
    with run.autocast():
        latents = torch.cat([still.encode(painter(part, 0))[0] for part in records.split(500)])
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(
        latents_mean=[round(float(m), 6) for m in mean], latents_std=[round(float(d), 6) for d in deviation]
    )
    run.log(f"deviations of the latents: {[round(float(d), 2) for d in deviation]}")


@torch.no_grad()
def to_latents(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, outline: bool = False, chunk: int = 500) -> Tensor:
    """All scenes as packed latents (scenes, tokens, channels) of unit variance; short ones are padded with zeros."""
    still, painter = still_vae(vae, run), Painter(run, outline)
    mean = torch.tensor(vae.config.latents_mean, device=run.device)[:, None, None]
    deviation = torch.tensor(vae.config.latents_std, device=run.device)[:, None, None]
    store = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    tokens = max(w * h for w, h in CANVASES) // 256
    result = torch.zeros(len(pool.canvas), tokens, 4 * vae.config.z_dim, device=run.device, dtype=store)
    begin = 0
    for canvas in range(len(CANVASES)):
        records = torch.from_numpy(pool.records[pool.canvas == canvas]).to(run.device)
        for part in records.split(chunk):
            with run.autocast():
                latents = still.encode(painter(part, canvas))[0]
            packed = fast.pack(((latents - mean) / deviation).contiguous())
            result[begin : begin + len(part), : packed.shape[1]] = packed.to(store)
            begin += len(part)
    run.log(f"latents of {begin} scenes")
    return result


@torch.no_grad()
def fidelity(vae: D.AutoencoderKLQwenImage, pool: Pool, run: Run, number: int = 256) -> tuple[dict[str, float], Tensor]:
    """Peak signal-to-noise ratio per canvas in fp32, and some pictures above their reconstructions."""
    still, painter = still_vae(vae, run), Painter(run)
    found, shown = {}, []
    for canvas, (width, height) in enumerate(CANVASES):
        records = torch.from_numpy(pool.records[pool.canvas == canvas][:number]).to(run.device)
        pictures = painter(records, canvas)
        again = still.decode(still.encode(pictures)[0]).clamp(-1, 1)
        error = float(((pictures - again) / 2).square().mean())
        found[f"{width}x{height}"] = round(-10 * float(torch.tensor(error).log10()), 2)
        if canvas == 0:
            shown = [pictures[:8], again[:8]]
    run.log(f"vae PSNR in dB: {found}")
    return found, torch.cat(shown) / 2 + 0.5

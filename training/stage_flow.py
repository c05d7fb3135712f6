"""Third stage: the denoiser learns by flow matching on the latents, the text encoder being finished.

The velocity `noise - picture` is learnt at noise levels drawn with the scheduler's own shift. One caption in ten is
replaced by an empty prompt, for guidance. At low noise, tokens that show a thing weigh more than background. A side
task asks the tokens, after two thirds of the blocks, what will be there (shape, colour, texture): it ties words to
places early; its layer is thrown away afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import diffusers as D
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import components, fast, stage_text
from training.captured import Repeated
from training.optim import Optimizer, split
from training.pool import WORDS, Pool
from training.run import Pace, Run
from training.scenes import CANVASES, COLOURS, SHAPES, TEXTURES

PEAK_RATE = 2e-3
ADAM_SHARE = 0.5
DROPPED = 0.1
ASKED = 0.05
FOREGROUND = 2.0  # extra weight of tokens that show a thing, without noise
EMA = 0.9995
SHOWN = (len(SHAPES) + 1, len(COLOURS) + 1, len(TEXTURES) + 1)
EVERY = 60.0  # seconds between checkpoints


@dataclass
class Data:
    """The pool on the device, as latents and embeddings."""

    latents: Tensor  # (scenes, tokens, channels)
    shown: Tensor  # (scenes, tokens, 3)
    words: Tensor  # (scenes, wordings, WORDS, width)
    lengths: Tensor  # (scenes, wordings)
    canvas: Tensor
    empty_words: Tensor  # (empty prompts, WORDS, width)
    empty_lengths: Tensor


@dataclass
class Batch:
    latents: Tensor
    shown: Tensor
    words: Tensor
    lengths: Tensor
    canvas: Tensor


def to_device(pool: Pool, latents: tuple[Tensor, Tensor], pipe: D.QwenImagePipeline, run: Run) -> Data:
    def put(values: object) -> Tensor:
        return torch.as_tensor(values, device=run.device).long()

    with torch.no_grad():
        empty_words, empty_lengths = stage_text.of_texts(pipe, stage_text.EMPTY_PROMPTS, run)
    words = stage_text.to_words(pipe, pool, run)
    return Data(*latents, words, put(pool.lengths), put(pool.canvas), empty_words.to(words.dtype), empty_lengths)


def draw(data: Data, number: int) -> Batch:
    """A random batch."""
    device = data.latents.device
    row = torch.randint(len(data.latents), (number,), device=device)
    wording = torch.randint(data.words.shape[1], (number,), device=device)
    empty = torch.randint(len(data.empty_words), (number,), device=device)
    dropped = torch.rand(number, device=device) < DROPPED
    return Batch(
        latents=data.latents[row].float(),
        shown=data.shown[row].long(),
        words=torch.where(dropped[:, None, None], data.empty_words[empty], data.words[row, wording]),
        lengths=torch.where(dropped, data.empty_lengths[empty], data.lengths[row, wording]),
        canvas=data.canvas[row],
    )


class Learner(nn.Module):
    """The denoiser and the side task's layer; `forward` is the losses of a batch."""

    def __init__(self, pipe: D.QwenImagePipeline, run: Run) -> None:
        super().__init__()
        self.denoiser = pipe.transformer
        self.head = nn.Linear(pipe.transformer.inner_dim, sum(SHOWN)).to(run.device)
        self.denoise = fast.Denoiser(self.denoiser, run.compile(fast.run_block))
        grids = [(h // 16, w // 16) for w, h in CANVASES]
        self.tokens = torch.tensor([h * w for h, w in grids], device=run.device)
        self.rotary = fast.rotary_tables(self.denoiser, grids, WORDS)
        self.losses: Callable[..., tuple[Tensor, Tensor]] = run.compile(_losses)

    def trained(self) -> dict[str, nn.Parameter]:
        """What learns, by name."""
        return {n: p for n, p in self.named_parameters() if p.requires_grad}

    def forward(self, batch: Batch, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(batch.latents.shape[1], device=sigma.device)
        seen = places < self.tokens[batch.canvas][:, None]
        mask = torch.cat([torch.arange(WORDS, device=sigma.device) < batch.lengths[:, None], seen], 1)
        cos, sin = (t[batch.canvas][:, :, None] for t in self.rotary)
        s = sigma[:, None, None]
        found, middle = self.denoise((1 - s) * batch.latents + s * noise, sigma, batch.words, mask, (cos, sin))
        return self.losses(found, noise - batch.latents, self.head(middle), batch.shown, (seen, sigma))


def _losses(
    found: Tensor, wanted: Tensor, answers: Tensor, shown: Tensor, where: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The weighted velocity error and the side task's cross entropy, over tokens that exist."""
    seen, sigma = where
    there = seen & (shown[..., 0] > 0)
    weight = seen + FOREGROUND * there * (1 - sigma[:, None]).square()
    error = (found.float() - wanted).square().mean(-1)
    flow = (error * weight).sum() / weight.sum()
    asked = torch.stack(
        [
            F.cross_entropy(a.float().flatten(0, 1), q.flatten(), reduction="none")
            for a, q in zip(answers.split(SHOWN, dim=-1), shown.unbind(-1), strict=True)
        ]
    )
    return flow, (asked.mean(0) * seen.flatten()).sum() / seen.sum()


def noise_levels(number: int, device: torch.device) -> Tensor:
    """Half uniform, half around the middle, then shifted as the scheduler shifts them."""
    uniform = torch.rand(number, device=device)
    middle = torch.randn(number, device=device).sigmoid()
    u = torch.where(torch.arange(number, device=device) % 2 == 0, uniform, middle)
    return components.SHIFT * u / (1 + (components.SHIFT - 1) * u)


def _is_hidden(name: str, parameter: Tensor) -> bool:
    inside = "transformer_blocks" in name and "_mod." not in name and "lora" not in name
    return inside and parameter.ndim == 2


class _Average:
    """Exponential average of parameters, computed on the device alone."""

    def __init__(self, values: list[nn.Parameter]) -> None:
        self.values = values
        self.mean = [p.detach().clone() for p in values]
        self.count = torch.zeros((), device=values[0].device)

    @torch.no_grad()
    def update(self) -> None:
        self.count += 1
        share = 1 - torch.minimum(self.count / (self.count + 9), torch.full_like(self.count, EMA))
        difference = torch._foreach_sub([p.detach() for p in self.values], self.mean)
        torch._foreach_mul_(difference, share)
        torch._foreach_add_(self.mean, difference)

    @torch.no_grad()
    def swap(self) -> None:
        """Parameters and averages change places; once more changes them back."""
        for parameter, mean in zip(self.values, self.mean, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(kept)


@dataclass
class Plan:
    """How the stage runs. `judge`, every `interval` seconds, and `save` find the averaged weights in place."""

    batch: int
    start: int = 0  # steps that earlier runs took
    rate: float = PEAK_RATE
    judge: Callable[[], str] | None = None
    interval: float = 60.0
    save: Callable[[int], None] | None = None


def step_of(
    learner: Learner, data: Data, run: Run, optimizer: Optimizer, average: _Average, batch: int
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        drawn = draw(data, batch)
        noise = torch.randn_like(drawn.latents)
        optimizer.zero_grad()
        with run.autocast():
            flow, asked = learner(drawn, noise_levels(batch, run.device), noise)
        (flow + ASKED * asked).backward()
        norm = optimizer.clip(1.0)
        optimizer.step()
        average.update()
        return torch.stack([flow.detach(), asked.detach(), norm])

    return step


def train(learner: Learner, data: Data, run: Run, pace: Pace, plan: Plan) -> None:
    """Trains in place and ends with the averaged weights."""
    run.reseed(3 + plan.start)
    parameters = learner.trained()
    hidden, others = split(parameters.items(), _is_hidden)
    optimizer, average = Optimizer(hidden, others, decay=0.01, share=ADAM_SHARE), _Average(list(parameters.values()))
    repeated = Repeated("flow", step_of(learner, data, run, optimizer, average, plan.batch), run)
    saved = judged = clock = time.monotonic()
    counted = 0
    for step in pace:
        optimizer.set_rate(pace.rate(plan.rate, warmup=400))
        told = repeated()
        if step % 50 == 0:
            flow, asked, norm = told.tolist()
            run.note("flow loss", plan.start + step, flow)
            run.note("what tokens show", plan.start + step, asked)
            if not flow < 10:
                raise RuntimeError(f"the loss is {flow} at step {step}")
        if step % 1000 == 0:
            speed = (step - counted) / (time.monotonic() - clock)
            clock, counted = time.monotonic(), step
            losses = f"loss {flow:.4f} shown {asked:.4f} gradient {norm:.3f}"
            run.log(f"flow step {plan.start + step} {losses} {speed:.1f} steps/s {pace.progress():.0%}")
        if step % 50 == 0 and plan.judge is not None and time.monotonic() - judged > plan.interval:
            average.swap()
            run.log(f"flow step {plan.start + step}: {plan.judge()}")
            average.swap()
            judged = time.monotonic()
        if step % 50 == 0 and plan.save is not None and time.monotonic() - saved > EVERY:
            average.swap()
            plan.save(plan.start + step)
            average.swap()
            saved = time.monotonic()
    run.profile("flow", repeated)
    average.swap()
    if plan.save is not None:
        plan.save(plan.start + pace.step)
    run.log(f"flow done: {pace.step} steps of {plan.batch} in {pace.spent():.0f} s")

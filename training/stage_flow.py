"""Second stage: text encoder and denoiser learn together, by flow matching on the latents.

The velocity `noise - picture` is learnt at noise levels drawn with the scheduler's own shift. One caption in ten is
replaced by an empty prompt, for guidance. The last token of a caption is also asked what the caption says; that part of
the loss makes words mean something early and is thrown away afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import diffusers as D
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import components, fast
from training.pool import CLASSES, WORDS, Pool, encode, template
from training.run import Pace, Run, adamw, set_rate
from training.scenes import CANVASES

PEAK_RATE = 1.2e-3
DROPPED = 0.1
ASKED = 0.05
EMA = 0.9995
EMPTY_PROMPTS = [" ", ""]


@dataclass
class Data:
    """The pool on the device, with its latents."""

    latents: Tensor  # (scenes, tokens, channels)
    ids: Tensor  # (scenes, wordings, WORDS)
    lengths: Tensor
    labels: Tensor
    canvas: Tensor
    empty_ids: Tensor  # (len(EMPTY_PROMPTS), WORDS)
    empty_lengths: Tensor


@dataclass
class Batch:
    latents: Tensor
    ids: Tensor
    lengths: Tensor
    labels: Tensor
    canvas: Tensor


def to_device(pool: Pool, latents: Tensor, pipe: D.QwenImagePipeline, run: Run) -> Data:
    def put(values: object) -> Tensor:
        return torch.as_tensor(values, device=run.device).long()

    empty = encode(pipe.tokenizer, EMPTY_PROMPTS, template(pipe.prompt_template_encode))
    rest = (put(pool.ids), put(pool.lengths), put(pool.labels), put(pool.canvas))
    return Data(latents, *rest, *(put(e) for e in empty))


def draw(data: Data, number: int, generator: torch.Generator) -> Batch:
    """A random batch; dropped captions have no labels."""

    def ints(high: int) -> Tensor:
        return torch.randint(high, (number,), device=data.latents.device, generator=generator)

    row, wording, empty = ints(len(data.latents)), ints(data.ids.shape[1]), ints(len(data.empty_ids))
    dropped = torch.rand(number, device=row.device, generator=generator) < DROPPED
    return Batch(
        latents=data.latents[row].float(),
        ids=torch.where(dropped[:, None], data.empty_ids[empty], data.ids[row, wording]),
        lengths=torch.where(dropped, data.empty_lengths[empty], data.lengths[row, wording]),
        labels=torch.where(dropped[:, None], -1, data.labels[row]),
        canvas=data.canvas[row],
    )


class Learner(nn.Module):
    """Text encoder, denoiser and the question head; `forward` is the loss of a batch."""

    def __init__(self, pipe: D.QwenImagePipeline, run: Run) -> None:
        super().__init__()
        self.text, self.denoiser = pipe.text_encoder, pipe.transformer
        self.head = nn.Linear(pipe.text_encoder.config.text_config.hidden_size, sum(CLASSES)).to(run.device)
        before = template(pipe.prompt_template_encode)[0]
        ids = pipe.tokenizer(before).input_ids
        if len(ids) != components.TEMPLATE_TOKENS:
            raise ValueError(f"the template has {len(ids)} tokens; the pipeline cuts {components.TEMPLATE_TOKENS} off")
        self.encode = fast.TextEncoder(self.text, torch.tensor(ids, device=run.device))
        self.denoise = fast.Denoiser(self.denoiser)
        grids = [(h // 16, w // 16) for w, h in CANVASES]
        self.tokens = torch.tensor([h * w for h, w in grids], device=run.device)
        self.rotary = fast.rotary_tables(self.denoiser, grids, WORDS)
        if run.compiled:
            self.encode.layer = torch.compile(fast.text_layer)
            for block in self.denoiser.transformer_blocks:
                block.compile()

    def trained(self) -> dict[str, nn.Parameter]:
        """What learns, by name. The vision tower has no part in this."""
        return {n: p for n, p in self.named_parameters() if p.requires_grad and ".visual." not in n}

    def forward(self, batch: Batch, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        words = self.encode(batch.ids)
        places = torch.arange(batch.latents.shape[1], device=sigma.device)
        seen = places < self.tokens[batch.canvas][:, None]
        mask = torch.cat([torch.arange(WORDS, device=sigma.device) < batch.lengths[:, None], seen], 1)
        cos, sin = (t[batch.canvas][:, :, None] for t in self.rotary)
        s = sigma[:, None, None]
        found = self.denoise((1 - s) * batch.latents + s * noise, sigma, words, mask, (cos, sin))
        error = (found.float() - (noise - batch.latents)).square().mean(-1)
        flow = (error * seen).sum() / seen.sum()
        last = words[torch.arange(len(words), device=sigma.device), batch.lengths - 1]
        answers = self.head(last).float().split(CLASSES, dim=-1)
        asked = torch.stack(
            [F.cross_entropy(a, q, ignore_index=-1) for a, q in zip(answers, batch.labels.unbind(1), strict=True)]
        )
        return flow, asked.nan_to_num().mean()


def noise_levels(number: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Half uniform, half around the middle, then shifted as the scheduler shifts them."""
    uniform = torch.rand(number, device=device, generator=generator)
    middle = torch.randn(number, device=device, generator=generator).sigmoid()
    u = torch.where(torch.arange(number, device=device) % 2 == 0, uniform, middle)
    return components.SHIFT * u / (1 + (components.SHIFT - 1) * u)


def train(learner: Learner, data: Data, run: Run, pace: Pace, batch: int) -> None:
    """Trains in place and ends with the averaged weights. Resumes from a checkpoint named `flow`."""
    parameters = learner.trained()
    values = list(parameters.values())
    average = [p.detach().clone() for p in values]
    optimizer, generator = adamw(values, run.device, decay=0.01), run.generator(2)
    state = run.load("flow")
    if state is not None:
        _restore(state, values, average, optimizer)
        pace.step, pace.before = state["step"], state["spent"]
    saved = run.elapsed()
    for step in pace:
        drawn = draw(data, batch, generator)
        noise = torch.randn(drawn.latents.shape, device=run.device, generator=generator)
        with run.autocast():
            flow, asked = learner(drawn, noise_levels(batch, generator, run.device), noise)
        set_rate(optimizer, pace.rate(PEAK_RATE, warmup=300))
        (flow + ASKED * asked).backward()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, [p.detach() for p in values], 1 - min(EMA, (step + 1) / (step + 10)))
        if step % 50 == 0:
            run.note("flow loss", step, float(flow.detach()))
            run.note("caption questions", step, float(asked.detach()))
        if step % 500 == 0:
            losses = f"loss {float(flow.detach()):.4f} asked {float(asked.detach()):.3f}"
            run.log(f"flow step {step} {losses} {step / max(pace.spent(), 1e-9):.1f}/s {pace.progress():.0%}")
        if run.elapsed() - saved > 60:
            saved = run.elapsed()
            _save(values, average, optimizer, run, pace)
    _save(values, average, optimizer, run, pace)
    with torch.no_grad():
        for parameter, mean in zip(values, average, strict=True):
            parameter.copy_(mean)
    run.log(f"flow done: {pace.step} steps of {batch} in {pace.spent():.0f} s")


def _save(
    values: list[nn.Parameter], average: list[Tensor], optimizer: torch.optim.Optimizer, run: Run, pace: Pace
) -> None:
    state = {"values": [v.detach() for v in values], "average": average, "optimizer": optimizer.state_dict()}
    run.save("flow", {**state, "step": pace.step + 1, "spent": pace.spent()})


@torch.no_grad()
def _restore(
    state: dict[str, object], values: list[nn.Parameter], average: list[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    for own, kept in zip([*values, *average], [*state["values"], *state["average"]], strict=True):  # type: ignore[misc]
        own.copy_(kept)
    optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]

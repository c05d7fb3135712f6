"""A pipeline as diffusers has them, around modules that compute next to nothing, exactly.

The modules only add and multiply element by element, so a merged call gives bit for bit what single ones give. They
note every call: how many samples, in which greenlet. A prompt's text decides what goes wrong: see `MARKS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from greenlet import getcurrent

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.request import ArrayData, Event, Failed, Finished, OmniDiffusionSamplingParams, Request

CHANNELS = 4
LENGTH = 6  # tokens of a prompt
PIXELS = 8  # along one side of the latents

# Numbers that a prompt with this word brings to the denoiser as its first value.
MARKS = {"boom": 1000.0, "nan": 2000.0, "huge": 3000.0}


class Noting(torch.nn.Module):
    """A module that notes its calls: how many samples each has had, and the greenlet it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.batches: list[int] = []
        self.greenlets: set[Any] = set()

    def note(self, samples: int) -> None:
        self.batches.append(samples)
        self.greenlets.add(getcurrent())

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype


class TextEncoder(Noting):
    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """(batch, length) -> (batch, length, channels)."""
        self.note(len(input_ids))
        values = input_ids.unsqueeze(-1).to(self.dtype)
        return (values.expand(*input_ids.shape, CHANNELS) * self.scale,)


class Denoiser(Noting):
    """`limit`: samples that fit in memory."""

    def __init__(self, limit: int = 64) -> None:
        super().__init__()
        self.limit = limit

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """(batch, tokens, channels), (batch,), (batch, length, channels) -> (batch, tokens, channels)."""
        self.note(len(hidden_states))
        words = encoder_hidden_states[:, :1]
        marks = (words[:, 0, 0] / self.scale).tolist()
        if MARKS["boom"] in marks:
            raise ValueError("boom")
        if len(hidden_states) + 100 * marks.count(MARKS["huge"]) > self.limit:
            raise torch.OutOfMemoryError(f"{len(hidden_states)} samples")
        ill = (words == MARKS["nan"] * self.scale).to(self.dtype) * float("nan")
        ill = torch.where(words == MARKS["nan"] * self.scale, ill, torch.zeros_like(words))
        return (hidden_states * self.scale + timestep.reshape(-1, 1, 1) / 1024 + words / 64 + ill,)


class Vae(Noting):
    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        self.note(len(pixels))
        return (pixels / self.scale,)

    def decode(self, latents: torch.Tensor) -> tuple[torch.Tensor]:
        """(batch, tokens, channels) -> (batch, 3, height, width); the width is always the same."""
        self.note(len(latents))
        return (latents[..., :3].movedim(-1, 1).reshape(len(latents), 3, -1, PIXELS) * self.scale,)


Predict = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def guided(transformer: Any, latents: torch.Tensor, t: torch.Tensor, cond: Any, uncond: Any) -> torch.Tensor:
    """One after the other, as most pipelines do."""
    positive = transformer(hidden_states=latents, timestep=t.expand(1), encoder_hidden_states=cond)[0]
    negative = transformer(hidden_states=latents, timestep=t.expand(1), encoder_hidden_states=uncond)[0]
    return negative + 3 * (positive - negative)


def batched(transformer: Any, latents: torch.Tensor, t: torch.Tensor, cond: Any, uncond: Any) -> torch.Tensor:
    """Both as one call of two samples, as other pipelines do."""
    both = transformer(torch.cat([latents, latents]), t.expand(2), torch.cat([cond, uncond]))[0]
    positive, negative = both.chunk(2)
    return negative + 3 * (positive - negative)


def unguided(transformer: Any, latents: torch.Tensor, t: torch.Tensor, cond: Any, uncond: Any) -> torch.Tensor:
    return transformer(latents, t.expand(1), cond)[0]  # type: ignore[no-any-return]


class FakePipeline(DiffusionPipeline):
    """`predict` is what a step does with the denoiser."""

    def __init__(self, text_encoder: Any, transformer: Any, vae: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=scheduler)
        self.vae_scale_factor = 8
        self.predict: Predict = guided
        self.set_progress_bar_config(disable=True)

    def encode(self, prompt: str) -> torch.Tensor:
        codes = [float(ord(c) % 32) for c in prompt.ljust(LENGTH)[:LENGTH]]
        codes[0] = next((mark for word, mark in MARKS.items() if word in prompt), codes[0])
        return self.text_encoder(torch.tensor([codes]))[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | None = None,
        negative_prompt: str = "",
        height: int = PIXELS * 8,
        width: int = PIXELS * 8,
        num_inference_steps: int = 4,
        flavour: str = "sweet",
        generator: Any = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        if flavour not in ("sweet", "sour"):
            raise ValueError(f"flavour is {flavour}: must be sweet or sour")
        cond, uncond = self.encode(prompt or ""), self.encode(negative_prompt)
        latents = randn_tensor((1, height * width // 64, CHANNELS), generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        with self.progress_bar(total=num_inference_steps) as bar:
            for t in self.scheduler.timesteps:
                noise = self.predict(self.transformer, latents, t, cond, uncond)
                latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
                bar.update()
        if output_type == "latent":
            return ImagePipelineOutput(images=latents)
        pixels = self.vae.decode(latents)[0].permute(0, 2, 3, 1).numpy()
        return ImagePipelineOutput(images=pixels if output_type == "np" else self.numpy_to_pil(pixels))


class StableDiffusionPipeline(FakePipeline):
    """By its name of a family whose calls are all merged."""


class MadeUpPipeline(FakePipeline):
    """Of no family."""


def pipeline_of(kind: type[FakePipeline] = StableDiffusionPipeline, predict: Predict = guided, **options: Any) -> Any:
    made = kind(TextEncoder(), Denoiser(**options), Vae(), FlowMatchEulerDiscreteScheduler())
    made.predict = predict
    return made


def engine_of(pipeline: Any, **knobs: Any) -> DiffusionEngine:
    return DiffusionEngine(EngineConfig.from_flat(model="fake", **knobs), pipeline, torch.device("cpu"))


def request_of(request_id: str, prompt: str = "a cat", steps: int = 4, seed: int | None = 0, **params: Any) -> Request:
    params = {"output_type": "np"} | params
    sampling = OmniDiffusionSamplingParams(num_inference_steps=steps, seed=seed, **params)
    return Request(request_id=request_id, prompt=prompt, params=sampling)


def solo(pipeline: Any, request: Request, index: int = 0) -> np.ndarray[Any, Any]:
    """What the bare pipeline gives for one output of a request."""
    own = copy.copy(pipeline)
    own.scheduler = copy.deepcopy(pipeline.scheduler)
    params = request.params
    given = {"negative_prompt": params.negative_prompt, "height": params.height, "width": params.width}
    result = own(
        prompt=request.prompt,
        num_inference_steps=params.num_inference_steps,
        generator=torch.Generator().manual_seed((params.seed or 0) + index),
        output_type="np",
        **{name: value for name, value in given.items() if value is not None},
        **params.extra_args,
    )
    return np.asarray(result.images)[0]


def drive(engine: DiffusionEngine) -> dict[str, list[Event]]:
    """Step until nothing is left; all events, by request."""
    events: dict[str, list[Event]] = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def outcome(engine: DiffusionEngine) -> dict[str, Event]:
    """Step until nothing is left; the last event of each request."""
    return {request_id: events[-1] for request_id, events in drive(engine).items()}


def pixels(event: Event, index: int = 0) -> np.ndarray[Any, Any]:
    """An output of a request that asked for "np"."""
    assert isinstance(event, Finished), event
    (medium,) = event.outputs[index]
    assert isinstance(medium, ArrayData)
    return np.frombuffer(medium.data, dtype=medium.dtype).reshape(medium.shape)


def kind_of(event: Event) -> str:
    assert isinstance(event, Failed), event
    return event.error.kind

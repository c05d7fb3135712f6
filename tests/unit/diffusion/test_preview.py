"""What a scheduler's step would give if its schedule ended there: the picture that the model expects, and no trace."""

from __future__ import annotations

import copy
from typing import Any

import diffusers as D
import pytest
import torch

from polymux.diffusion.preview import predicted, preview_steps

STEPS = 6


@pytest.mark.parametrize(
    ("total", "count", "steps"),
    [
        (50, 3, {12, 25, 37}),
        (50, 1, {25}),
        (4, 3, {1, 2, 3}),
        (5, 3, {1, 2, 3}),
        (3, 3, {1, 2}),
        (2, 3, {1}),
        (1, 3, set()),
        (0, 3, set()),
        (2, 1, {1}),
        (9, 0, set()),
    ],
)
def test_previews_are_evenly_spread_before_the_last_step(total: int, count: int, steps: set[int]) -> None:
    assert preview_steps(total, count) == steps


def flow(**options: Any) -> D.FlowMatchEulerDiscreteScheduler:
    return D.FlowMatchEulerDiscreteScheduler(shift=3.0, **options)


def flow_unipc() -> D.UniPCMultistepScheduler:
    return D.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def flow_dpm() -> D.DPMSolverMultistepScheduler:
    return D.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def pndm() -> D.PNDMScheduler:
    return D.PNDMScheduler(skip_prk_steps=True)


def euler() -> D.EulerDiscreteScheduler:
    return D.EulerDiscreteScheduler(timestep_spacing="leading")


def euler_ancestral() -> D.EulerAncestralDiscreteScheduler:
    return D.EulerAncestralDiscreteScheduler(timestep_spacing="leading")


FLOW = [flow, flow_unipc, flow_dpm, D.FlowMatchHeunDiscreteScheduler]
NOISE = [
    D.DDIMScheduler,
    D.DDPMScheduler,
    pndm,
    euler,
    euler_ancestral,
    D.HeunDiscreteScheduler,
    D.LCMScheduler,
    D.DPMSolverMultistepScheduler,
    D.UniPCMultistepScheduler,
    D.DEISMultistepScheduler,
]
X0 = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4)


def begins_a_step(make: Any, call: int) -> bool:
    """Where a step has two calls of the scheduler, previews are predicted at the first one."""
    if make is pndm:
        return call != 1
    return call % 2 == 0 or make not in (D.FlowMatchHeunDiscreteScheduler, D.HeunDiscreteScheduler)


class Oracle:
    """A model that knows the picture: what it says of a sample always leads there."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.is_scaled = getattr(scheduler, "init_noise_sigma", 1) == 1
        self.is_flow = "prediction_type" not in scheduler.config or scheduler.config.prediction_type[:4] == "flow"

    def __call__(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        if self.is_flow:
            return (sample - X0) / (timestep / 1000)
        signal = self.scheduler.alphas_cumprod[timestep.long()].float()
        if not self.is_scaled:  # the sample is the picture plus noise, not a mix of both
            return (sample - X0) / ((1 - signal) / signal).sqrt()
        return (sample - signal.sqrt() * X0) / (1 - signal).sqrt()


@pytest.mark.parametrize("make", [*FLOW, *NOISE])
def test_a_prediction_is_where_the_model_leads(make: Any) -> None:
    scheduler = make()
    scheduler.set_timesteps(STEPS)
    model, seen = Oracle(scheduler), 0
    sample = torch.randn(X0.shape, generator=torch.Generator().manual_seed(0))
    sample = sample * getattr(scheduler, "init_noise_sigma", 1)
    for i, t in enumerate(scheduler.timesteps):
        output = model(sample, t)
        if begins_a_step(make, i):
            latents = predicted(scheduler, (output, t, sample), {"return_dict": False})
            assert torch.allclose(latents, X0, atol=0.05), float((latents - X0).abs().max())
            seen += 1
        sample = scheduler.step(output, t, sample, return_dict=False)[0]
    assert seen >= STEPS
    assert torch.allclose(sample, X0, atol=0.05)


@pytest.mark.parametrize("make", [*FLOW, *NOISE, lambda: flow(stochastic_sampling=True)])
def test_a_prediction_leaves_no_trace(make: Any) -> None:
    def run(look: bool) -> list[torch.Tensor]:
        scheduler, generator = make(), torch.Generator().manual_seed(1)
        scheduler.set_timesteps(STEPS)
        options: dict[str, Any] = {"return_dict": False}
        if "generator" in scheduler.step.__code__.co_varnames:
            options["generator"] = generator
        sample = torch.randn(X0.shape, generator=torch.Generator().manual_seed(0))
        for i, t in enumerate(scheduler.timesteps):
            output = sample * 0.1
            if look and begins_a_step(make, i):
                before = sample.clone()
                predicted(scheduler, (output, t, sample), options)
                assert torch.equal(sample, before)
            sample = scheduler.step(output, t, sample, **options)[0]
        return [sample, generator.get_state()]

    plain, looked_at = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, looked_at, strict=True))


def test_the_last_step_is_what_it_is() -> None:
    scheduler = flow(use_dynamic_shifting=True, shift_terminal=0.02)
    scheduler.set_timesteps(STEPS, mu=0.7)
    scheduler.set_begin_index(0)
    sample = torch.randn(X0.shape, generator=torch.Generator().manual_seed(0))
    for t in scheduler.timesteps:
        last = predicted(copy.deepcopy(scheduler), (sample * 0.3,), {"timestep": t, "sample": sample})
        sample = scheduler.step(sample * 0.3, t, sample, return_dict=False)[0]
    assert torch.equal(last, sample)

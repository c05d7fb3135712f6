"""Pictures of what is not finished yet.

A `Watch` looks on while a session computes. At chosen steps it asks a copy of the session's scheduler what the step
would give if the schedule ended with it: the latents that the model expects in the end. A `Replay` lets the pipeline's
own code make a picture of that: in a session of its own the same call runs again without the work, as the components'
answers are stand-ins of the right shape and every step of the scheduler gives the expected latents. What the pipeline
calls after its loop is real. So nothing has to be known about a pipeline, except that it has a scheduler; how its
latents are scaled, packed and decoded stays its own business.

Knows neither requests nor when a preview is made.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from polymux.diffusion.call import Call, Tap
from polymux.diffusion.deferred import forced
from polymux.diffusion.progress import StepCounter
from polymux.diffusion.random_state import RandomState
from polymux.diffusion.tracebacks import drop_frames
from polymux.families.base import Family

log = logging.getLogger(__name__)

PLAIN = (bool, int, float, str, type(None))

Plan = Callable[[int, int], set[int]]
Form = tuple[str, str]  # component and method


def no_previews(pipeline: Any, family: Family) -> str | None:
    """Why no previews can be made of what `pipeline` makes; None if they can."""
    if family.modality != "image":
        return f"previews are pictures, and it makes {family.modality}"
    scheduler = pipeline.components.get("scheduler")
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "timesteps")):
        return "it has no scheduler that could tell what an unfinished picture will become"
    return family.no_previews


def preview_steps(total: int, count: int) -> set[int]:
    """After which of `total` steps there are previews: `count`, evenly spread, but none after the last step."""
    return {total * (i + 1) // (count + 1) for i in range(count)} - {0} if total > count else {*range(1, total)}


@dataclass(frozen=True)
class Prediction:
    """What the latents will be, as expected after some step."""

    step: int
    latents: torch.Tensor
    answers: dict[Form, list[Any]]  # what the calls of the session returned, up to its first step


@dataclass
class Watch(Tap):
    """Of a session that has previews made. `prediction` is the last one that nobody has taken."""

    steps: StepCounter
    count: int
    device: torch.device
    plan: Plan = preview_steps
    prediction: Prediction | None = None
    answers: dict[Form, list[Any]] = field(default_factory=dict)
    looping: bool = False
    last: int = 0

    def attach(self, pipeline: Any) -> None:
        scheduler = pipeline.scheduler
        step = scheduler.step

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.looping = True
            number = self.steps.done + 1
            if number > self.last and number in self.plan(self.steps.total, self.count):
                self.last = number
                self._predict(number, scheduler, args, kwargs)
            return step(*args, **kwargs)

        scheduler.__dict__["step"] = watched

    def note(self, call: Call, result: Any) -> None:
        if not self.looping:
            self.answers.setdefault((call.component.name, call.method), []).append(stand_in(call, result))

    def take(self) -> Prediction | None:
        prediction, self.prediction = self.prediction, None
        return prediction

    def _predict(self, number: int, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outside = RandomState.now(self.device)
        try:
            latents = predicted(scheduler, args, kwargs)
        except Exception as error:  # whatever a scheduler does, it must not cost the picture
            log.warning("no preview: the scheduler failed with %s\n%s", type(error).__name__, drop_frames(error))
        else:
            self.prediction = Prediction(number, latents, self.answers)
        finally:
            outside.apply()


@dataclass
class Replay(Tap):
    """Of a session that makes a preview. Its calls keep to themselves, so that no output depends on previews."""

    company = "previews"

    prediction: Prediction
    asked: dict[Form, int] = field(default_factory=dict)

    def attach(self, pipeline: Any) -> None:
        scheduler, latents = pipeline.scheduler, self.prediction.latents
        step = scheduler.step

        @functools.wraps(step)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            return tree_map(lambda leaf: like(latents, leaf), step(*args, **kwargs))

        scheduler.__dict__["step"] = replayed

    def answer(self, call: Call) -> tuple[Any] | None:
        form = (call.component.name, call.method)
        known, number = self.prediction.answers.get(form, []), self.asked.get(form, 0)
        self.asked[form] = number + 1
        if call.phase == "denoise" and known:  # each step asks as the first one did
            number %= len(known)
        return (tree_map(_writable, known[number]),) if number < len(known) else None


def like(latents: torch.Tensor, leaf: Any) -> Any:
    """The latents in place of what a step of the scheduler returns for them."""
    fits = isinstance(leaf, torch.Tensor) and leaf.shape == latents.shape
    return latents.to(leaf.dtype, copy=True) if fits else leaf


def stand_in(call: Call, result: Any) -> Any:
    """The same structure without the values. An encoded picture keeps them: it may be part of what is decoded."""
    if call.component.role == "decoder":
        return result
    return tree_map(_empty, result)


def _empty(leaf: Any) -> Any:
    """Takes no memory, however large it looks; of what cannot be told to be small, nothing is left."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return leaf if isinstance(leaf, PLAIN) else None


def _writable(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and 0 in leaf.stride() else leaf


def predicted(scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `scheduler.step(*args, **kwargs)` would return if the schedule ended there. Changes none of them."""
    args, kwargs = tree_map(_own, forced((args, kwargs)))
    ending = copy.deepcopy(scheduler)
    end_schedule(ending, kwargs["timestep"] if "timestep" in kwargs else args[1])
    result = type(ending).step(ending, *args, **kwargs)
    latents = result[0] if isinstance(result, tuple) else result.prev_sample
    assert isinstance(latents, torch.Tensor)
    return latents


def _own(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def end_schedule(scheduler: Any, timestep: Any) -> None:
    """Make `timestep` the last one of the scheduler's schedule: what comes after it is what comes at the very end."""
    index = _index(scheduler, timestep)
    scheduler.timesteps = scheduler.timesteps[: index + 1]
    # Those that count by timesteps alone take what is before a timestep from how many steps there are: one spans all.
    scheduler.num_inference_steps = index + 1 if hasattr(scheduler, "step_index") else 1
    if hasattr(scheduler, "sigmas"):
        sigmas = scheduler.sigmas.clone()
        sigmas[index + 1 :] = sigmas[-1]
        scheduler.sigmas = sigmas


def _index(scheduler: Any, timestep: Any) -> int:
    if not hasattr(scheduler, "step_index"):
        return int((scheduler.timesteps == timestep).nonzero()[0])
    if scheduler.step_index is not None:
        return int(scheduler.step_index)
    return int(scheduler.index_for_timestep(timestep) if scheduler.begin_index is None else scheduler.begin_index)

"""The engine on a CUDA device: what the CPU tests cannot show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.request import Event, Failed, Finished, OmniDiffusionSamplingParams, Preview, Request

DEVICE = torch.device("cuda", 0)
CALL = {"prompt": "a photo of a cat", "height": 64, "width": 64, "num_inference_steps": 4}


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=["qwen-image", "z-image", "sd15"])
def pipeline(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Any:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(request.param)))
    return load_pipeline(config.model, DEVICE, torch.float32)


def engine_for(pipeline: Any, in_flight: int = 8) -> DiffusionEngine:
    return DiffusionEngine(
        EngineConfig.from_flat(model="tiny", max_num_seqs=in_flight, enforce_eager=True), pipeline, DEVICE
    )


def request(request_id: str, seed: int) -> Request:
    params = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=4, seed=seed, output_type="np")
    return Request(request_id=request_id, prompt="a photo of a cat", params=params)


def drive(engine: DiffusionEngine) -> dict[str, Event]:
    last: dict[str, Event] = {}
    while engine.busy:
        last |= {event.request_id: event for event in engine.step()}
    return last


def picture(event: Event) -> Any:
    assert isinstance(event, Finished), event
    return from_wire(event.outputs[0][0])


def test_output_is_that_of_the_bare_pipeline(pipeline: Any) -> None:
    bare = [
        pipeline(**CALL, generator=torch.Generator().manual_seed(seed), output_type="np").images[0] for seed in (1, 2)
    ]
    alone = engine_for(pipeline, in_flight=1)
    alone.add(request("1", 1))
    assert np.abs(picture(drive(alone)["1"]) - bare[0]).max() == 0.0
    alone.close()
    both = engine_for(pipeline)
    for seed in (1, 2):
        both.add(request(str(seed), seed))
    done = drive(both)
    assert both.stats.calls != both.stats.merged
    assert max(np.abs(picture(done[str(s)]) - bare[s - 1]).max() for s in (1, 2)) < 1e-4
    both.close()


def test_previews_leave_the_output_alone(pipeline: Any) -> None:
    engine = engine_for(pipeline, in_flight=1)
    engine.add(request("1", 1))
    plain = picture(drive(engine)["1"])
    engine.add(msgspec.structs.replace(request("1", 1), partial_images=3))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    assert [event.step for event in events if isinstance(event, Preview)] == [1, 2, 3]
    assert np.array_equal(picture(events[-1]), plain)
    engine.close()


def test_default_generators_of_the_caller_are_left_alone(pipeline: Any) -> None:
    torch.cuda.manual_seed(5)
    wanted = torch.rand(3, device=DEVICE)
    torch.cuda.manual_seed(5)
    engine = engine_for(pipeline)
    engine.add(request("1", 1))
    drive(engine)
    engine.close()
    assert torch.equal(torch.rand(3, device=DEVICE), wanted)


def test_seconds_are_those_of_the_device(pipeline: Any) -> None:
    engine = engine_for(pipeline)
    engine.add(request("1", 1))
    event = drive(engine)["1"]
    engine.close()
    assert isinstance(event, Finished)
    assert 0 < event.metrics.denoise < event.metrics.total
    assert 0 < event.metrics.decode < event.metrics.total


def test_a_merged_call_that_does_not_fit_runs_in_parts(pipeline: Any) -> None:
    """A hook that really fills the memory when the batch is larger than two."""
    denoiser = pipeline.components.get("transformer") or pipeline.components["unet"]
    limit = 2

    def greedy(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next(v for v in (*args, *kwargs.values()) if isinstance(v, (torch.Tensor, list)))
        if len(first) > limit:
            torch.empty(torch.cuda.get_device_properties(DEVICE).total_memory, dtype=torch.uint8, device=DEVICE)

    engine = engine_for(pipeline)
    original = denoiser.__dict__["forward"]  # the engine's entry; the hook must sit below it
    component = next(c for c in engine.components if c.module is denoiser)
    entry = component.entries["forward"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        greedy(denoiser, args, kwargs)
        return entry.original(*args, **kwargs)

    component.entries["forward"] = replace(entry, original=forward)
    assert denoiser.__dict__["forward"] is original
    for seed in range(5):
        engine.add(request(str(seed), seed))
    done = drive(engine)
    assert all(isinstance(event, Finished) for event in done.values())
    assert not engine.runner.unmergeable
    engine.close()


def test_one_that_cannot_fit_fails_alone(pipeline: Any) -> None:
    engine = engine_for(pipeline)
    component = next(c for c in engine.components if c.role == "denoiser")
    entry = component.entries["forward"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next(v for v in (*args, *kwargs.values()) if isinstance(v, (torch.Tensor, list)))
        if first[0].shape[-1] == 12 or (first[0].ndim == 2 and first[0].shape[0] == 36):  # 96 pixels wide
            torch.empty(torch.cuda.get_device_properties(DEVICE).total_memory, dtype=torch.uint8, device=DEVICE)
        return entry.original(*args, **kwargs)

    component.entries["forward"] = replace(entry, original=forward)
    large = OmniDiffusionSamplingParams(height=96, width=96, num_inference_steps=4, seed=1, output_type="np")
    engine.add(Request(request_id="large", prompt="a photo of a cat", params=large))
    engine.add(request("small", 1))
    done = drive(engine)
    assert isinstance(done["large"], Failed) and done["large"].error.kind == "OutOfMemoryError"
    assert isinstance(done["small"], Finished)
    engine.close()

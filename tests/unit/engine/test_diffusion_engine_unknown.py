"""A pipeline that polymux has no declaration for: it runs, and nothing is assumed about it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from fake_pipeline import (
    Denoiser,
    MadeUpPipeline,
    drive,
    engine_of,
    guided,
    kind_of,
    outcome,
    pipeline_of,
    pixels,
    request_of,
    solo,
)

from polymux.errors import InvalidRequestError
from polymux.request import ArrayData, Finished


def test_it_runs_unmerged_and_equal() -> None:
    pipeline = pipeline_of(MadeUpPipeline)
    requests = [request_of(f"r{i}", steps=3 + i, seed=i) for i in range(3)]
    wanted = [solo(pipeline, request) for request in requests]
    pipeline.transformer.batches.clear()
    engine = engine_of(pipeline)
    assert engine.capabilities.family is None and not engine.capabilities.merges
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    for request, want in zip(requests, wanted, strict=True):
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)
    assert set(pipeline.transformer.batches) == {1}
    assert engine.stats.calls == engine.stats.merged


def test_what_it_does_to_its_components_reaches_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    """Some pipelines swap parts of their components for the time of a call."""

    def swapping(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        before = transformer.strength
        if cond[0, 0, 0] == ord("x") % 32 / 2:
            transformer.strength = 3.0
        try:
            return guided(transformer, latents, t, cond, uncond)
        finally:
            transformer.strength = before

    class Adjustable(Denoiser):
        strength = 1.0

        def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            (out,) = super().forward(hidden_states, timestep, encoder_hidden_states)
            return (out * self.strength,)

    pipeline = pipeline_of(MadeUpPipeline, predict=swapping)
    pipeline.transformer = Adjustable()
    requests = [request_of("a", "cat"), request_of("b", "xx"), request_of("c", "dog")]
    wanted = [solo(pipeline, request) for request in requests]
    engine = engine_of(pipeline)
    assert "MadeUpPipeline is of no family" in caplog.text
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    for request, want in zip(requests, wanted, strict=True):
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)


def test_progress_and_abort_work_on_it() -> None:
    engine = engine_of(pipeline_of(MadeUpPipeline))
    engine.add(request_of("a", steps=5))
    engine.add(request_of("b", steps=5))
    for _ in range(6):
        engine.step()
    engine.abort("a")
    events = drive(engine)
    assert kind_of(events["a"][-1]) == "RequestAbortedError"
    assert isinstance(events["b"][-1], Finished)
    steps = [event.step for event in events["b"] if hasattr(event, "step")]
    assert steps == sorted(steps) and steps[-1] == 5


def test_arguments_from_the_operator_reach_every_call() -> None:
    calls: list[dict[str, Any]] = []

    class Recorded(MadeUpPipeline):
        def __call__(self, flavour: str = "sweet", **others: Any) -> Any:
            calls.append({"flavour": flavour} | others)
            return super().__call__(flavour=flavour, **others)

        __call__.__signature__ = inspect.signature(MadeUpPipeline.__call__)  # type: ignore[attr-defined]

    call_kwargs = {"flavour": "sour", "negative_prompt": "ugly"}
    engine = engine_of(pipeline_of(Recorded), diffusers_call_kwargs=call_kwargs)
    engine.add(request_of("a"))
    engine.add(request_of("b", negative_prompt="dull", extra_args={"flavour": "sweet"}))
    outcome(engine)
    assert [(c["flavour"], c["negative_prompt"]) for c in calls] == [("sour", "ugly"), ("sweet", "dull")]


def test_an_argument_that_it_does_not_take_is_refused_with_a_list_of_what_it_takes() -> None:
    engine = engine_of(pipeline_of(MadeUpPipeline))
    with pytest.raises(InvalidRequestError) as error:
        engine.add(request_of("a", extra_args={"colour": "red"}))
    assert error.value.param == "colour"
    for name in ("flavour", "height", "negative_prompt", "num_inference_steps", "prompt"):
        assert name in error.value.message
    for name in ("generator", "return_dict"):
        assert name not in error.value.message
    with pytest.raises(InvalidRequestError) as error:
        engine.add(request_of("a", guidance_scale=3.0))
    assert error.value.param == "guidance_scale"
    assert not engine.busy


def test_what_only_its_own_check_notices_is_the_request_s_fault() -> None:
    engine = engine_of(pipeline_of(MadeUpPipeline))
    engine.add(request_of("a", extra_args={"flavour": "bitter"}))
    event = outcome(engine)["a"]
    assert kind_of(event) == "InvalidRequestError"
    assert "must be sweet or sour" in event.error.message  # type: ignore[union-attr]


def test_an_argument_of_the_operator_that_it_does_not_take_is_told_at_the_warm_up() -> None:
    engine = engine_of(pipeline_of(MadeUpPipeline), diffusers_call_kwargs={"colour": "red"})
    with pytest.raises(InvalidRequestError, match="colour"):
        engine.warm_up()


class BarePipeline(DiffusionPipeline):
    """No autoencoder, no scheduler, no bar, no generator: a module and a call that returns a tuple."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet)

    def __call__(self, num_frames: int = 3, size: int = 2) -> Any:
        return (self.unet(torch.ones(1, num_frames, size, size, 3)),)


def test_the_barest_pipeline() -> None:
    engine = engine_of(BarePipeline(torch.nn.Identity()))
    assert engine.capabilities.modality == "video"
    assert engine.capabilities.arguments == ("num_frames", "size")
    engine.add(request_of("a", prompt=None, steps=None, output_type="pil", extra_args={"size": 4}))  # type: ignore[arg-type]
    event = outcome(engine)["a"]
    assert isinstance(event, Finished), event
    (medium,) = event.outputs[0]
    assert isinstance(medium, ArrayData) and (medium.dtype, medium.shape) == ("uint8", (3, 4, 4, 3))
    assert event.metrics.steps == 0
    engine.warm_up()

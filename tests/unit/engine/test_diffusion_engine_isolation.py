"""What goes wrong in one request is that request's alone."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import (
    Denoiser,
    TextEncoder,
    Vae,
    drive,
    engine_of,
    guided,
    kind_of,
    outcome,
    pipeline_of,
    pixels,
    request_of,
    solo,
    unguided,
)

from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import InvalidRequestError
from polymux.request import Event, Failed, Finished


def beside(pipeline: Any, *bad: Any, **knobs: Any) -> tuple[dict[str, Event], DiffusionEngine]:
    """Run bad requests among good ones, which get what they get alone; the bad ones' ends."""
    good = [request_of("good0", "a cat", seed=1), request_of("good1", "dogs", steps=6, seed=2)]
    wanted = [solo(pipeline, request) for request in good]
    engine = engine_of(pipeline, **knobs)
    for request in (good[0], *bad, good[1]):
        engine.add(request)
    done = outcome(engine)
    for request, want in zip(good, wanted, strict=True):
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)
    assert not engine.jobs and not engine.scheduler.waiting
    return done, engine


@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_an_error_of_a_component(in_flight: int) -> None:
    done, engine = beside(pipeline_of(), request_of("bad", "boom"), max_num_seqs=in_flight)
    assert kind_of(done["bad"]) == "GenerationError"
    assert "ValueError: boom" in done["bad"].error.message  # type: ignore[union-attr]
    assert not engine.runner.unmergeable


def test_nan_in_the_latents() -> None:
    done, _ = beside(pipeline_of(), request_of("bad", "nan"))
    assert kind_of(done["bad"]) == "NonFiniteOutputError"


def test_nan_where_nothing_is_decoded() -> None:
    done, _ = beside(pipeline_of(), request_of("bad", "nan", output_type="latent"))
    assert kind_of(done["bad"]) == "NonFiniteOutputError"


def test_a_decoder_that_makes_nan_of_one_request() -> None:
    class Fragile(Vae):
        def decode(self, latents: torch.Tensor) -> Any:
            (made,) = super().decode(latents)
            return (made.where(made.abs().amax(dim=(1, 2, 3), keepdim=True) < 100, float("nan")),)

    def exploding(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        noise = guided(transformer, latents, t, cond, uncond)
        return noise + 1000 if cond[0, 0, 0] == ord("x") % 32 / 2 else noise

    pipeline = pipeline_of(predict=exploding)
    pipeline.vae = Fragile()
    done, _ = beside(pipeline, request_of("bad", "xx"))
    assert kind_of(done["bad"]) == "NonFiniteOutputError"


def test_only_the_request_that_does_not_fit_fails() -> None:
    done, engine = beside(pipeline_of(limit=3), request_of("bad", "huge"), request_of("fits", "a hat", seed=3))
    assert kind_of(done["bad"]) == "OutOfMemoryError"
    assert isinstance(done["fits"], Finished)
    assert not engine.runner.unmergeable


def test_memory_that_ends_in_the_pipeline_itself() -> None:
    def greedy(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        if cond[0, 0, 0] == ord("x") % 32 / 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return guided(transformer, latents, t, cond, uncond)

    done, _ = beside(pipeline_of(predict=greedy), request_of("bad", "xx"))
    assert kind_of(done["bad"]) == "OutOfMemoryError"


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, AssertionError, StopIteration, RecursionError])
def test_an_error_of_the_pipeline_at_a_step(step: int, kind: type[Exception]) -> None:
    def failing(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        noise = guided(transformer, latents, t, cond, uncond)
        if cond[0, 0, 0] == ord("x") % 32 / 2:
            counts.append(t)
            if len(counts) > step:
                raise kind("at this step")
        return noise

    counts: list[Any] = []
    done, _ = beside(pipeline_of(predict=failing), request_of("bad", "xx"))
    assert kind_of(done["bad"]) == "GenerationError"
    assert len(counts) == step + 1


def test_one_of_several_outputs_fails_and_ends_its_request() -> None:
    drawn: list[int] = []

    def third_fails(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        if cond[0, 0, 0] == ord("x") % 32 / 2:
            drawn.append(1)
            if len(drawn) == 7:
                raise RuntimeError("the third output's second step")
        return guided(transformer, latents, t, cond, uncond)

    done, engine = beside(pipeline_of(predict=third_fails), request_of("bad", "xx", num_outputs_per_prompt=4))
    assert kind_of(done["bad"]) == "GenerationError"
    assert engine.stats.running == 0


# Whose fault it is.


def test_what_only_the_pipeline_notices_is_the_request_s_fault() -> None:
    done, _ = beside(pipeline_of(), request_of("bad", extra_args={"flavour": "bitter"}))
    assert kind_of(done["bad"]) == "InvalidRequestError"
    assert "flavour is bitter: must be sweet or sour" in done["bad"].error.message  # type: ignore[union-attr]


def test_a_component_s_value_error_is_not_the_request_s_fault() -> None:
    """Not even in the first call that a request makes."""

    class Broken(TextEncoder):
        def forward(self, input_ids: torch.Tensor) -> Any:
            if (input_ids[:, 0] == ord("x") % 32).any():
                raise ValueError("shapes do not match")
            return super().forward(input_ids)

    pipeline = pipeline_of()
    pipeline.text_encoder = Broken()
    done, _ = beside(pipeline, request_of("bad", "xx"))
    assert kind_of(done["bad"]) == "GenerationError"


def test_a_refused_request_leaves_nothing() -> None:
    engine = engine_of(pipeline_of())
    for bad in (
        request_of("a", steps=0),
        request_of("a", height=63),
        request_of("a", extra_args={"colour": "red"}),
        request_of("a", strength=0.5),
        request_of(""),
    ):
        with pytest.raises(InvalidRequestError):
            engine.add(bad)
    assert not engine.busy and engine.step() == []


def test_an_id_is_in_flight_once() -> None:
    pipeline = pipeline_of()
    first = request_of("a", seed=1)
    wanted = solo(pipeline, first)
    engine = engine_of(pipeline)
    engine.add(first)
    for _ in range(3):
        with pytest.raises(InvalidRequestError) as error:
            engine.add(request_of("a", seed=2))
        assert error.value.param == "request_id"
        engine.step()
    np.testing.assert_array_equal(pixels(outcome(engine)["a"]), wanted)
    engine.add(request_of("a", seed=2))
    assert isinstance(outcome(engine)["a"], Finished)


def test_a_log_line_names_the_place_and_not_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    def quoting(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        raise LookupError(prompt)

    prompt = "it is my secret"
    engine = engine_of(pipeline_of(predict=quoting))
    engine.add(request_of("a", prompt))
    with caplog.at_level(logging.DEBUG):
        outcome(engine)
    assert "LookupError" in caplog.text and "in quoting" in caplog.text
    assert "secret" not in caplog.text


# Stranger things.


def test_a_pipeline_that_catches_its_components_errors_goes_on() -> None:
    def stubborn(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        try:
            return guided(transformer, latents, t, cond, uncond)
        except Exception:
            return latents * 0

    done, _ = beside(pipeline_of(predict=stubborn), request_of("odd", "boom"))
    assert isinstance(done["odd"], Finished)


def test_an_error_of_the_progress_bar() -> None:
    pipeline = pipeline_of()

    def failing(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        if cond[0, 0, 0] == ord("x") % 32 / 2:
            pipeline.progress_bar(total=3).nonsense()
        return guided(transformer, latents, t, cond, uncond)

    pipeline.predict = failing
    done, _ = beside(pipeline, request_of("bad", "xx"))
    assert kind_of(done["bad"]) == "GenerationError"


def test_a_pipeline_that_returns_nothing() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline)
    pipeline.vae.decode = lambda latents: (None,)  # not intercepted any more
    engine.add(request_of("a"))
    assert kind_of(outcome(engine)["a"]) == "GenerationError"


class Interrupted(Denoiser):
    """Is interrupted once, at its third call."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        out = super().forward(hidden_states, timestep, encoder_hidden_states)
        if len(self.batches) == 3:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("in_flight", [1, 8])
def test_an_interrupt_in_a_component_loses_nothing(in_flight: int) -> None:
    """Whoever catches it may go on stepping."""
    pipeline = pipeline_of()
    requests = [request_of("a"), request_of("b", seed=1)]
    wanted = [solo(pipeline, request) for request in requests]
    pipeline.transformer = Interrupted()
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    for request in requests:
        engine.add(request)
    with pytest.raises(KeyboardInterrupt):
        outcome(engine)
    done = outcome(engine)
    for request, want in zip(requests, wanted, strict=True):
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)


def test_an_interrupt_in_a_pipeline_ends_its_request_alone() -> None:
    def interrupted(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        if cond[0, 0, 0] == ord("x") % 32 / 2:
            raise KeyboardInterrupt
        return unguided(transformer, latents, t, cond, uncond)

    pipeline = pipeline_of(predict=interrupted)
    engine = engine_of(pipeline)
    for name, prompt in {"a": "cat", "x": "xx", "b": "dog"}.items():
        engine.add(request_of(name, prompt))
    with pytest.raises(KeyboardInterrupt):
        outcome(engine)
    done = drive(engine)
    assert isinstance(done["x"][-1], Failed)
    assert isinstance(done["a"][-1], Finished) and isinstance(done["b"][-1], Finished)

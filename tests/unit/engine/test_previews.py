"""Previews: how many, of what, and that neither outputs nor other requests notice."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_pipeline import (
    FakePipeline,
    MadeUpPipeline,
    Vae,
    batched,
    drive,
    engine_of,
    guided,
    kind_of,
    pipeline_of,
    pixels,
    request_of,
    unguided,
)
from PIL import Image

from polymux.diffusion.preview import Watch, preview_steps
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import InvalidRequestError
from polymux.media.wire import from_wire
from polymux.request import Event, Failed, Finished, Preview, Request


def wanted(request_id: str = "a", previews: int = 3, **options: Any) -> Request:
    return msgspec.structs.replace(request_of(request_id, **options), partial_images=previews)


def previews_in(events: list[Event]) -> list[Preview]:
    return [event for event in events if isinstance(event, Preview)]


def run(engine: DiffusionEngine, *requests: Request) -> dict[str, list[Event]]:
    for request in requests:
        engine.add(request)
    return drive(engine)


def last_too(engine: DiffusionEngine) -> None:
    """From now on there is a preview after the last step as well."""
    for job in engine.jobs.values():
        for session in job.sessions.values():
            assert isinstance(session.tap, Watch)
            session.tap.plan = lambda total, count: preview_steps(total, count) | {total}


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("predict", [guided, batched, unguided])
def test_previews_come_at_their_steps_and_change_nothing(predict: Any, in_flight: int) -> None:
    engine = engine_of(pipeline_of(predict=predict), max_num_seqs=in_flight)
    plain = run(engine, wanted(previews=0, steps=8))["a"]
    events = run(engine, wanted(steps=8))["a"]
    assert [(p.index, p.step) for p in previews_in(events)] == [(0, 2), (0, 4), (0, 6)]
    assert np.array_equal(pixels(events[-1]), pixels(plain[-1]))
    finished = events[-1]
    assert isinstance(finished, Finished) and finished.metrics.steps == 8
    assert engine.stats.steps == 16


@pytest.mark.parametrize("output_type", ["pil", "np"])
def test_a_preview_is_the_picture_that_will_be(output_type: str) -> None:
    """After the last step nothing is left to guess."""
    engine = engine_of(pipeline_of())
    final = run(engine, request_of("a", output_type="pil"))["a"][-1]
    assert isinstance(final, Finished)
    engine.add(wanted(output_type=output_type))
    engine.step()
    last_too(engine)
    *before, last = previews_in(drive(engine)["a"])
    picture = np.asarray(from_wire(final.outputs[0][0]))
    assert [p.step for p in before] == [1, 2, 3] and last.step == 4
    assert np.array_equal(np.asarray(from_wire(last.media[0])), picture)
    assert not np.array_equal(np.asarray(from_wire(before[0].media[0])), picture)


def test_previews_of_latents_are_pictures() -> None:
    events = run(engine_of(pipeline_of()), wanted(output_type="latent"))["a"]
    assert [p.step for p in previews_in(events)] == [1, 2, 3]
    assert all(isinstance(from_wire(p.media[0]), Image.Image) for p in previews_in(events))


def test_a_preview_costs_one_decode_and_nothing_else() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, prompt_cache_gib=0.0)
    run(engine, wanted(previews=0, steps=8))
    encodes, denoises = len(pipeline.text_encoder.batches), len(pipeline.transformer.batches)
    pipeline.text_encoder.batches.clear()
    pipeline.transformer.batches.clear()
    pipeline.vae.batches.clear()
    run(engine, wanted(steps=8))
    assert len(pipeline.text_encoder.batches) == encodes
    assert len(pipeline.transformer.batches) <= denoises  # the first step's calls are no longer new to the engine
    assert pipeline.vae.batches == [1, 1, 1, 1]


def test_each_output_has_its_own() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=4)
    plain = run(engine, wanted(previews=0, num_outputs_per_prompt=2))["a"][-1]
    events = run(engine, wanted(previews=2, num_outputs_per_prompt=2))["a"]
    assert sorted((p.index, p.step) for p in previews_in(events)) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(np.array_equal(pixels(events[-1], i), pixels(plain, i)) for i in range(2))


def test_calls_for_previews_keep_to_themselves() -> None:
    """The final decode of a request and that of a preview do not become one: outputs never depend on previews."""
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=4)
    run(engine, wanted("first", steps=4))
    alone = pixels(run(engine, wanted("b", previews=0, steps=4))["b"][-1])
    pipeline.vae.batches.clear()
    events = run(engine, wanted("a", steps=8), wanted("b", previews=0, steps=4), wanted("c", steps=8))
    assert sum(pipeline.vae.batches) == 3 + 3 + 3  # an output each; three previews for each of two
    assert max(pipeline.vae.batches) == 2  # previews of one step, of two requests, do become one
    assert np.array_equal(pixels(events["b"][-1]), alone)
    assert [len(previews_in(events[name])) for name in "abc"] == [3, 0, 3]


def test_a_preview_that_is_late_is_skipped() -> None:
    """Nothing is queued up: while one is in the works there is no other of the same output."""
    engine = engine_of(pipeline_of(), max_num_seqs=4)
    engine.scheduler.ready = lambda call: call.component.name != "vae"  # others go first
    events = run(engine, wanted(steps=8))["a"]
    assert len(previews_in(events)) == 1
    assert isinstance(events[-1], Finished)


def test_a_preview_dies_with_its_request() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=4)
    engine.scheduler.ready = lambda call: call.component.name != "vae"
    engine.add(wanted(steps=8))
    while not engine.jobs["a"].previews:
        engine.step()
    engine.abort("a")
    (events,) = drive(engine).values()
    assert kind_of(events[-1]) == "RequestAbortedError"
    assert not engine.scheduler.waiting
    assert pipeline.vae.batches == []


class Moody(Vae):
    """Decodes only what is finished: the last of its calls."""

    calls = 0

    def decode(self, latents: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1
        if self.calls < 3:
            raise RuntimeError("not yet")
        return super().decode(latents)


def test_a_preview_that_fails_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = pipeline_of()
    pipeline.vae = Moody()
    events = run(engine_of(pipeline), wanted(previews=2))["a"]
    assert previews_in(events) == []
    assert isinstance(events[-1], Finished)
    assert "no preview: RuntimeError" in caplog.text


def test_a_scheduler_that_cannot_look_ahead_costs_only_the_preview(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = pipeline_of()

    class Strict(type(pipeline.scheduler)):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> Any:
            assert len(self.timesteps) == 4, "a schedule is a schedule"
            return super().step(*args, **kwargs)

    pipeline.scheduler = Strict.from_config(pipeline.scheduler.config)
    events = run(engine_of(pipeline), wanted(previews=2))["a"]
    assert previews_in(events) == []
    assert isinstance(events[-1], Finished)
    assert "no preview: the scheduler failed with AssertionError" in caplog.text


def test_one_request_without_previews_is_as_ever() -> None:
    engine = engine_of(pipeline_of())
    events = run(engine, request_of("a"))["a"]
    assert previews_in(events) == []


@pytest.mark.parametrize("number", [-1, 4, True, "2", None])
def test_there_are_at_most_three(number: Any) -> None:
    with pytest.raises(InvalidRequestError, match="partial_images") as refused:
        engine_of(pipeline_of()).add(wanted(previews=number))
    assert refused.value.param == "partial_images"


def test_an_unknown_pipeline_makes_none_and_says_why() -> None:
    engine = engine_of(pipeline_of(MadeUpPipeline))
    assert not engine.capabilities.previews
    with pytest.raises(InvalidRequestError, match="partial_images=1: must be 0: no declaration"):
        engine.add(wanted(previews=1))


def test_a_pipeline_without_a_scheduler_makes_none() -> None:
    class StableDiffusion3Pipeline(FakePipeline):
        """Of a known family, by its name."""

    pipeline = pipeline_of(StableDiffusion3Pipeline)
    pipeline.register_modules(scheduler=None)
    engine = engine_of(pipeline)
    assert not engine.capabilities.previews
    assert "no scheduler" in engine.capabilities.refused["partial_images"]


def test_a_request_that_fails_has_no_more_previews() -> None:
    engine = engine_of(pipeline_of())
    events = run(engine, wanted(prompt="nan", steps=8))["a"]
    assert isinstance(events[-1], Failed)
    assert not engine.scheduler.waiting and not engine.busy

"""The engine over a pipeline: every request gets what it would get alone, and the numbers about it are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import (
    MadeUpPipeline,
    Predict,
    batched,
    drive,
    engine_of,
    guided,
    outcome,
    pipeline_of,
    pixels,
    request_of,
    solo,
    unguided,
)
from greenlet import getcurrent

from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError, InvalidRequestError
from polymux.request import Finished, ImageData, Progress, Request

STEPS = {"r0": 3, "r1": 7, "r2": 5}


def some_requests(**params: Any) -> list[Request]:
    return [
        request_of(name, f"{name} is a prompt", steps=steps, seed=10 * i, **params)
        for i, (name, steps) in enumerate(STEPS.items())
    ]


@pytest.mark.parametrize("predict", [guided, batched, unguided])
@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_everybody_gets_what_they_would_get_alone(predict: Predict, in_flight: int) -> None:
    pipeline = pipeline_of(predict=predict)
    requests = some_requests(negative_prompt="ugly")
    wanted = {request.request_id: solo(pipeline, request) for request in requests}
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    for name, want in wanted.items():
        np.testing.assert_array_equal(pixels(done[name]), want)
    merged = engine.stats.merged["transformer"] > engine.stats.calls["transformer"]
    assert merged == (in_flight > 1)


def test_requests_that_come_later_join_those_in_flight() -> None:
    pipeline = pipeline_of()
    requests = some_requests()
    wanted = {request.request_id: solo(pipeline, request) for request in requests}
    pipeline.transformer.batches.clear()
    engine = engine_of(pipeline)
    done = {}
    for turn in range(100):
        if turn % 4 == 0 and requests:
            engine.add(requests.pop())
        done |= {event.request_id: event for event in engine.step()}
    assert not engine.busy
    for name, want in wanted.items():
        np.testing.assert_array_equal(pixels(done[name]), want)
    assert max(pipeline.transformer.batches) >= 4


def test_guided_as_one_call_and_unguided_merge() -> None:
    """Two samples of one request and one of another in one call."""

    def either(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        first = cond[0, 0, 0] == ord("b") % 32 / 2
        return (batched if first else unguided)(transformer, latents, t, cond, uncond)

    pipeline = pipeline_of(predict=either)
    requests = [request_of("b", "both"), request_of("o", "one", seed=1)]
    wanted = [solo(pipeline, request) for request in requests]
    pipeline.transformer.batches.clear()
    engine = engine_of(pipeline)
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    for request, want in zip(requests, wanted, strict=True):
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)
    assert pipeline.transformer.batches == [3] * 4


def test_another_size_does_not_hold_the_others_up() -> None:
    pipeline = pipeline_of(predict=unguided)
    requests = [request_of("odd", height=128), *(request_of(name) for name in "abc")]
    engine = engine_of(pipeline)
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    assert pixels(done["odd"]).shape == (16, 8, 3) and pixels(done["a"]).shape == (8, 8, 3)
    assert sorted(pipeline.transformer.batches) == [1] * 4 + [3] * 4


def test_the_token_budget_bounds_a_call() -> None:
    pipeline = pipeline_of(predict=unguided)
    engine = engine_of(pipeline, max_batched_tokens=64 * 3)  # 64 tokens a request
    for i in range(6):
        engine.add(request_of(f"r{i}"))
    engine.add(request_of("large", height=1024))
    done = outcome(engine)
    assert all(isinstance(event, Finished) for event in done.values())
    assert set(pipeline.transformer.batches) == {3, 1}
    assert pixels(done["large"]).shape == (128, 8, 3)


def test_calls_never_run_in_a_session() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline)
    for request in some_requests():
        engine.add(request)
    outcome(engine)
    for module in (pipeline.text_encoder, pipeline.transformer, pipeline.vae):
        assert module.greenlets == {getcurrent()}


# Progress and numbers.


@pytest.mark.parametrize("params", [{}, {"output_type": "latent"}, {"num_outputs_per_prompt": 3}])
@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_progress_never_falls_and_reaches_the_total(params: dict[str, Any], in_flight: int) -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=in_flight)
    for request in some_requests(**params):
        engine.add(request)
    events = drive(engine)
    for name, steps in STEPS.items():
        *progress, end = events[name]
        assert isinstance(end, Finished) and all(isinstance(p, Progress) for p in progress)
        done = [p.step for p in progress if isinstance(p, Progress)]
        totals = [p.total for p in progress if isinstance(p, Progress)]
        total = steps * params.get("num_outputs_per_prompt", 1)
        assert done == sorted(done) and done[-1] == total == totals[-1]
        assert set(totals) == {0, total} and totals == sorted(totals)
        assert len(set(progress)) == len(progress)
        assert end.metrics.steps == total


def test_the_phases_of_a_request() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=1)
    for request in some_requests():
        engine.add(request)
    events = drive(engine)
    phases = [p.phase for p in events["r1"] if isinstance(p, Progress)]
    assert [p for i, p in enumerate(phases) if p not in phases[:i]] == ["queued", "encode", "denoise", "decode"]


def test_metrics_add_up() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=2, prompt_cache_gib=0.0)
    for request in some_requests():
        engine.add(request)
    done = outcome(engine)
    for name, steps in STEPS.items():
        event = done[name]
        assert isinstance(event, Finished)
        m = event.metrics
        assert m.steps == steps
        assert min(m.encode, m.denoise, m.decode) > 0 and m.queue >= 0
        assert m.queue + m.encode + m.denoise + m.decode <= m.total
    assert done["r2"].metrics.queue > done["r0"].metrics.queue  # type: ignore[union-attr]
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.steps) == (0, 0, sum(STEPS.values()))
    assert stats.merged == {"text_encoder": 6, "transformer": 2 * stats.steps, "vae": 3}
    assert set(stats.seconds) == {"encode", "denoise", "decode"} and min(stats.seconds.values()) > 0


def test_stats_while_it_runs() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=2)
    for request in some_requests():
        engine.add(request)
    assert (engine.stats.running, engine.stats.waiting) == (0, 3)
    seen = []
    while engine.busy:
        engine.step()
        seen.append((engine.stats.running, engine.stats.waiting, engine.stats.steps))
    assert seen[0] == (2, 1, 0) and seen[-1] == (0, 0, 15)
    assert [steps for *_, steps in seen] == sorted(steps for *_, steps in seen)


# Seeds.


def test_a_seed_decides_and_no_seed_is_drawn_and_told() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline)
    for name, seed in {"a": 5, "b": 5, "c": 6, "d": None, "e": None}.items():
        engine.add(request_of(name, seed=seed))
    done = outcome(engine)
    np.testing.assert_array_equal(pixels(done["a"]), pixels(done["b"]))
    different = [pixels(done[name]).tobytes() for name in "acde"]
    assert len(set(different)) == 4
    assert [done[name].seeds for name in "abc"] == [[5], [5], [6]]  # type: ignore[union-attr]
    (drawn,) = done["d"].seeds  # type: ignore[union-attr]
    engine.add(request_of("again", seed=drawn))
    np.testing.assert_array_equal(pixels(outcome(engine)["again"]), pixels(done["d"]))


@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_output_i_is_the_one_of_seed_plus_i(in_flight: int) -> None:
    pipeline = pipeline_of()
    several = request_of("n", seed=40, num_outputs_per_prompt=4)
    wanted = [solo(pipeline, several, index) for index in range(4)]
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    engine.add(several)
    engine.add(request_of("one", seed=42))
    done = outcome(engine)
    for index, want in enumerate(wanted):
        np.testing.assert_array_equal(pixels(done["n"], index), want)
    np.testing.assert_array_equal(pixels(done["one"]), wanted[2])
    assert done["n"].seeds == [40, 41, 42, 43]  # type: ignore[union-attr]


def test_the_largest_seeds() -> None:
    engine = engine_of(pipeline_of())
    engine.add(request_of("a", seed=2**64 - 2, num_outputs_per_prompt=2))
    done = outcome(engine)
    assert done["a"].seeds == [2**64 - 2, 2**64 - 1]  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="seed"):
        engine.add(request_of("b", seed=2**64 - 1, num_outputs_per_prompt=2))


def test_a_generator_s_state_is_what_diffusers_would_draw_from() -> None:
    pipeline = pipeline_of()
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    state = generator.get_state()
    own = pipeline(prompt="a cat", num_inference_steps=4, generator=generator, output_type="np").images[0]
    params = request_of("a", seed=None, num_outputs_per_prompt=3).params
    engine = engine_of(pipeline)
    for name in "ab":
        given = bytes(state.numpy().tobytes())
        engine.add(Request(request_id=name, prompt="a cat", params=params, generator_state=given))
    done = outcome(engine)
    np.testing.assert_array_equal(pixels(done["a"]), own)
    assert done["a"].seeds[0] is None  # type: ignore[union-attr]
    outputs = [pixels(done["a"], i).tobytes() for i in range(3)]
    assert len(set(outputs)) == 3
    assert outputs == [pixels(done["b"], i).tobytes() for i in range(3)]


@pytest.mark.parametrize("state", [b"", b"abc", bytes(5056)])
def test_a_state_of_no_generator_is_refused(state: bytes) -> None:
    engine = engine_of(pipeline_of())
    request = Request(request_id="a", prompt="a", params=request_of("a", seed=None).params, generator_state=state)
    with pytest.raises(InvalidRequestError) as error:
        engine.add(request)
    assert error.value.param == "generator" and not engine.busy


@pytest.mark.parametrize("in_flight", [1, 8])
def test_random_numbers_of_the_pipeline_and_of_its_modules_follow_the_seed(in_flight: int) -> None:
    """As after torch.manual_seed(seed), whoever else runs; and the process's own generator is left alone."""

    def noisy(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        noise = unguided(transformer, latents, t, cond, uncond) + torch.rand(1)
        return noise + torch.rand_like(latents)

    class NoisyVae(type(pipeline_of().vae)):  # type: ignore[misc]
        def decode(self, latents: torch.Tensor) -> Any:
            return (super().decode(latents + torch.rand_like(latents))[0],)

    pipeline = pipeline_of(predict=noisy)
    pipeline.vae = NoisyVae()
    requests = some_requests()
    wanted = {}
    for request in requests:
        torch.manual_seed(request.params.seed or 0)
        wanted[request.request_id] = solo(pipeline, request)
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    assert torch.equal(torch.get_rng_state(), before)
    for name, want in wanted.items():
        np.testing.assert_array_equal(pixels(done[name]), want)


# Admission.


def finish_order(engine: DiffusionEngine) -> list[str]:
    order: list[str] = []
    while engine.busy:
        order += [event.request_id for event in engine.step() if isinstance(event, Finished)]
    return order


@pytest.mark.parametrize("late", [0, 5])
def test_a_request_of_many_outputs_leaves_places_to_others(late: int) -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=4)
    engine.add(request_of("many", num_outputs_per_prompt=10, steps=20))
    for _ in range(late):
        engine.step()
    for i in range(3):
        engine.add(request_of(f"one{i}", steps=20))
    assert finish_order(engine) == ["one0", "one1", "one2", "many"]


def test_places_in_flight_are_bounded_and_given_in_the_order_of_arrival() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=3)
    for i in range(7):
        engine.add(request_of(f"r{i}", steps=3))
    order: list[str] = []
    while engine.busy:
        order += [event.request_id for event in engine.step() if isinstance(event, Finished)]
        assert sum(len(job.sessions) for job in engine.jobs.values()) <= 3
    assert order == [f"r{i}" for i in range(7)]


def test_many_outputs_come_to_an_end_while_single_ones_keep_coming() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=2)
    engine.add(request_of("many", num_outputs_per_prompt=6, steps=2))
    finished: list[str] = []
    for turn in range(300):
        if len(engine.jobs) < 5:
            engine.add(request_of(f"one{turn}", steps=2))
        finished += [event.request_id for event in engine.step() if isinstance(event, Finished)]
    assert "many" in finished
    assert finished.index("many") < 40


# A pipeline under an engine, and without it.


def test_a_pipeline_can_be_called_past_its_engine_and_after_it() -> None:
    pipeline = pipeline_of()
    request = request_of("a")
    before = solo(pipeline, request)
    engine = engine_of(pipeline)
    np.testing.assert_array_equal(solo(pipeline, request), before)
    engine.add(request)
    for _ in range(3):
        engine.step()
    np.testing.assert_array_equal(solo(pipeline, request), before)
    np.testing.assert_array_equal(pixels(outcome(engine)["a"]), before)
    engine.close()
    np.testing.assert_array_equal(solo(pipeline, request), before)
    for module in (pipeline.text_encoder, pipeline.transformer, pipeline.vae):
        assert not {"forward", "encode", "decode"} & set(vars(module))


def test_a_pipeline_has_one_engine_at_a_time() -> None:
    pipeline = pipeline_of()
    first = engine_of(pipeline)
    with pytest.raises(ConfigError, match="already belongs to an engine"):
        engine_of(pipeline)
    first.add(request_of("a"))
    outcome(first)
    assert set(first.stats.calls) == {"text_encoder", "transformer", "vae"}
    first.close()
    second = engine_of(pipeline)
    first.close()
    second.add(request_of("a"))
    outcome(second)
    assert set(second.stats.calls) == {"text_encoder", "transformer", "vae"}


def test_two_engines_over_two_pipelines_take_turns() -> None:
    pipelines = [pipeline_of(), pipeline_of(MadeUpPipeline)]
    wanted = [solo(pipeline, request_of("a")) for pipeline in pipelines]
    engines = [engine_of(pipeline) for pipeline in pipelines]
    for engine in engines:
        engine.add(request_of("a"))
    done: list[Any] = [None, None]
    while any(engine.busy for engine in engines):
        for i, engine in enumerate(engines):
            done[i] = (engine.step() or [done[i]])[-1]
    for event, want in zip(done, wanted, strict=True):
        np.testing.assert_array_equal(pixels(event), want)


def test_pictures_and_latents() -> None:
    engine = engine_of(pipeline_of())
    engine.add(request_of("pil", output_type="pil"))
    engine.add(request_of("latent", output_type="latent"))
    done = outcome(engine)
    (picture,) = done["pil"].outputs[0]  # type: ignore[union-attr]
    assert isinstance(picture, ImageData) and (picture.mode, picture.width, picture.height) == ("RGB", 8, 8)
    assert pixels(done["latent"]).shape == (64, 4)

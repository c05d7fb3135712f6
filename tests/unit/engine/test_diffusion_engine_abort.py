"""Aborting: at once, wherever a request stands, unnoticed by the others, and nothing is left of it."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import (
    Predict,
    batched,
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
from greenlet import greenlet

from polymux.diffusion.call import Call
from polymux.diffusion.deferred import Deferred
from polymux.diffusion.session import Session
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.job import Job
from polymux.request import Failed, Finished

TURNS = 16  # more than the request below takes


def assert_empty(engine: DiffusionEngine) -> None:
    assert not engine.jobs and not engine.scheduler.waiting and not engine.busy
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)


@pytest.mark.parametrize("predict", [guided, batched, unguided])
@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_aborting_at_every_turn(predict: Predict, in_flight: int) -> None:
    pipeline = pipeline_of(predict=predict)
    others = [request_of("left", steps=3, seed=1), request_of("right", "dogs", steps=5, seed=2)]
    wanted = [solo(pipeline, request) for request in others]
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    phases = Counter[str]()
    for turn in range(TURNS):
        for request in (others[0], request_of("gone", "birds", steps=4), others[1]):
            engine.add(request)
        early = [event for _ in range(turn) for event in engine.step()]
        phases += Counter(event.phase for event in early[-1:] if hasattr(event, "phase"))
        engine.abort("gone")
        assert "gone" not in engine.jobs
        before = len(pipeline.transformer.batches)
        done = {event.request_id: event for event in early} | outcome(engine)
        for request, want in zip(others, wanted, strict=True):
            np.testing.assert_array_equal(pixels(done[request.request_id]), want)
        if in_flight > 1 and turn < 5:
            assert kind_of(done["gone"]) == "RequestAbortedError"
        assert isinstance(done["gone"], (Failed, Finished))
        assert before <= len(pipeline.transformer.batches)
        assert_empty(engine)
    assert {"encode", "denoise", "decode"} & set(phases)


def steps_to(engine: DiffusionEngine, phase: str) -> None:
    while not any(getattr(event, "phase", None) == phase for event in engine.step()):
        assert engine.busy


@pytest.mark.parametrize("phase", ["encode", "denoise", "decode"])
def test_an_aborted_request_computes_nothing_more(phase: str) -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline)
    engine.add(request_of("a", num_outputs_per_prompt=2))
    steps_to(engine, phase)
    calls = engine.stats.calls
    engine.abort("a")
    assert engine.busy, "its end is to be told"
    (event,) = engine.step()
    assert kind_of(event) == "RequestAbortedError"
    assert engine.stats.calls == calls
    assert_empty(engine)


def test_aborting_before_it_starts() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline)
    engine.add(request_of("a"))
    engine.abort("a")
    (event,) = engine.step()
    assert kind_of(event) == "RequestAbortedError"
    assert engine.stats.calls == {}
    assert_empty(engine)


def test_aborting_what_waits_for_a_place() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=2)
    for name in ("a", "b", "waits", "last"):
        engine.add(request_of(name))
    for _ in range(3):
        engine.step()
    engine.abort("waits")
    done = outcome(engine)
    assert kind_of(done["waits"]) == "RequestAbortedError"
    assert all(isinstance(done[name], Finished) for name in ("a", "b", "last"))
    assert sum(pipeline.vae.batches) == 3


def test_a_place_is_given_on_at_once() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=1)
    engine.add(request_of("long", steps=1000))
    engine.add(request_of("short", steps=2))
    for _ in range(5):
        engine.step()
    engine.abort("long")
    events = drive(engine)
    assert isinstance(events["short"][-1], Finished)
    assert kind_of(events["long"][-1]) == "RequestAbortedError"


def test_aborting_twice_and_what_is_unknown_or_over() -> None:
    engine = engine_of(pipeline_of())
    engine.abort("never")
    engine.add(request_of("a"))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert len(engine.step()) == 1
    engine.abort("a")
    assert_empty(engine)
    engine.add(request_of("a"))
    assert isinstance(outcome(engine)["a"], Finished), "the id is free again"
    engine.abort("a")
    assert engine.step() == []


def test_a_pipeline_that_catches_its_own_end() -> None:
    """By catching everything around a component's call, and by calling on while it ends."""

    def clinging(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        try:
            return guided(transformer, latents, t, cond, uncond)
        except BaseException:
            return unguided(transformer, latents, t, cond, uncond)

    def broad(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        try:
            return guided(transformer, latents, t, cond, uncond)
        except Exception:
            return latents

    def total(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        try:
            return guided(transformer, latents, t, cond, uncond)
        except BaseException:
            return latents

    for predict in (clinging, broad, total):
        pipeline = pipeline_of(predict=predict)
        other = request_of("other", seed=3)
        wanted = solo(pipeline, other)
        engine = engine_of(pipeline)
        engine.add(request_of("a", steps=50))
        engine.add(other)
        for _ in range(4):
            engine.step()
        engine.abort("a")
        done = outcome(engine)
        assert kind_of(done["a"]) == "RequestAbortedError"
        np.testing.assert_array_equal(pixels(done["other"]), wanted)
        assert_empty(engine)


def test_closing_ends_everything() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=2)
    for name in "abc":
        engine.add(request_of(name))
    for _ in range(4):
        engine.step()
    engine.close()
    events = engine.step()
    assert {event.request_id for event in events} == set("abc")
    assert {kind_of(event) for event in events} == {"RequestAbortedError"}
    assert_empty(engine)


# What is left.


KINDS = (Session, Call, Job, Deferred, greenlet, torch.Tensor)


def living() -> Counter[str]:
    """How many there are of what could be left of a request."""
    return Counter(kind.__name__ for thing in gc.get_objects() for kind in KINDS if issubclass(type(thing), kind))


def churn(engine: DiffusionEngine, rounds: int) -> None:
    """Requests of every fate: finished, aborted at every turn, failed."""
    for turn in range(rounds):
        for name, prompt in (("a", "cat"), ("b", "dog"), ("bad", "boom"), ("ill", "nan")):
            engine.add(request_of(name, prompt, num_outputs_per_prompt=1 + turn % 2))
        for _ in range(turn % 12):
            engine.step()
        engine.abort("a")
        drive(engine)


def test_nothing_is_left_of_two_hundred_requests() -> None:
    """And they are gone when they end, not when the collector comes: latents are large."""
    engine = engine_of(pipeline_of(limit=3), max_num_seqs=3)
    churn(engine, 12)
    gc.collect()
    gc.disable()
    try:
        before = living()
        churn(engine, 50)
        assert living() - before == Counter()
    finally:
        gc.enable()
    assert_empty(engine)


def test_thousands_of_waiting_requests() -> None:
    engine = engine_of(pipeline_of(predict=unguided), max_num_seqs=8)
    for i in range(3000):
        engine.add(request_of(f"r{i}", steps=1))
    for _ in range(5):
        engine.step()
    for i in range(0, 3000, 2):
        engine.abort(f"r{i}")
    assert (engine.stats.running, engine.stats.waiting) <= (8, 1500)
    for i in range(40, 3000):
        engine.abort(f"r{i}")
    done = outcome(engine)
    assert sum(isinstance(event, Finished) for event in done.values()) <= 40
    assert_empty(engine)

"""Requests of every kind at random: each ends once, in the way it would have ended alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fake_pipeline import (
    MadeUpPipeline,
    StableDiffusionPipeline,
    batched,
    engine_of,
    guided,
    kind_of,
    pipeline_of,
    pixels,
    request_of,
    solo,
    unguided,
)

from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.request import Event, Failed, Finished, Progress, Request

FATES = {"boom": "GenerationError", "nan": "NonFiniteOutputError", "huge": "OutOfMemoryError"}


def any_request(chance: random.Random, name: str) -> Request:
    prompt = chance.choice(["cat", "a dog", "many birds", *FATES])
    params: dict[str, Any] = {"negative_prompt": chance.choice([None, "dull"])}
    if chance.random() < 0.3:
        params["height"] = chance.choice([128, 192])
    if chance.random() < 0.2:
        params["extra_args"] = {"flavour": chance.choice(["sweet", "bitter"])}
    params["num_outputs_per_prompt"] = chance.choice([1, 1, 1, 2, 4])
    return request_of(name, prompt, steps=chance.randint(1, 9), seed=chance.randrange(2**63), **params)


def fate_of(request: Request) -> str | None:
    if request.params.extra_args.get("flavour") == "bitter":
        return "InvalidRequestError"
    return next((kind for word, kind in FATES.items() if word == request.prompt), None)


def run(engine: DiffusionEngine, requests: list[Request], chance: random.Random) -> dict[str, list[Event]]:
    """Add and abort at random moments until all have ended."""
    events: dict[str, list[Event]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.busy:
        while waiting and chance.random() < 0.4:
            engine.add(waiting.pop())
        if engine.jobs and chance.random() < 0.03:
            engine.abort(chance.choice(list(engine.jobs)))
        for event in engine.step():
            events[event.request_id].append(event)
        assert sum(len(job.sessions) for job in engine.jobs.values()) <= engine.max_sessions
    return events


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_in_whatever_order(seed: int) -> None:
    chance = random.Random(seed)
    kind = chance.choice([StableDiffusionPipeline, StableDiffusionPipeline, MadeUpPipeline])
    limit = chance.choice([2, 5, 64])
    pipeline = pipeline_of(kind, chance.choice([guided, batched, unguided]), limit=limit)
    requests = [any_request(chance, f"r{i}") for i in range(25)]
    knobs = {"max_num_seqs": chance.choice([1, 2, 5, 16]), "max_batched_tokens": chance.choice([64, 300, 16384])}
    engine = engine_of(pipeline, **knobs)
    events = run(engine, requests, chance)
    aborted = 0
    for request in requests:
        *progress, end = events[request.request_id]
        assert all(isinstance(event, Progress) for event in progress)
        if isinstance(end, Failed) and end.error.kind == "RequestAbortedError":
            aborted += 1
        elif (fate := fate_of(request)) is not None:
            assert kind_of(end) == fate
        else:
            assert isinstance(end, Finished), end
            assert end.metrics.steps == request.params.num_inference_steps * len(end.outputs)  # type: ignore[operator]
            for index in range(len(end.outputs)):
                np.testing.assert_array_equal(pixels(end, index), solo(pipeline, request, index))
    assert aborted < 15
    assert not engine.runner.unmergeable and not engine.scheduler.waiting
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)

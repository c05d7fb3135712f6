"""Where the time of a request went: every run that answered it, once, and of merged ones its share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_pipeline import Denoiser, engine_of, outcome, pipeline_of, request_of

from polymux.diffusion.call import Span
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.profiled import profile_of
from polymux.errors import InvalidRequestError
from polymux.omni_output import output_of
from polymux.profile import ComponentTime, Profile, StepTime, lines_of
from polymux.request import Finished, Request
from polymux.server.image_answer import Picture, inline
from polymux.server.profile_answer import RequestProfile

STEPS = 3


def profiles(engine: DiffusionEngine, *requests: Request) -> list[Profile | None]:
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    ends = [done[request.request_id] for request in requests]
    return [end.profile for end in ends if isinstance(end, Finished)]


def part(profile: Profile, component: str) -> ComponentTime:
    return next(part for part in profile.components if part.component == component)


def test_a_request_alone() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=1)
    (profile,) = profiles(engine, request_of("a", steps=STEPS, profile=True))
    assert profile is not None
    assert [(c.component, c.phase, c.runs) for c in profile.components] == [
        ("text_encoder", "encode", 2), ("transformer", "denoise", 2 * STEPS), ("vae", "decode", 1),
    ]  # fmt: skip
    assert [(step.step, step.runs, step.calls) for step in profile.steps] == [(i, 2, 1) for i in range(STEPS)]
    assert all(one.share == one.seconds > 0 for one in (*profile.components, *profile.steps))
    assert sum(step.seconds for step in profile.steps) == pytest.approx(part(profile, "transformer").seconds)
    assert profile.computing == pytest.approx(sum(c.seconds for c in profile.components))
    spent = profile.queue + profile.computing + profile.pipeline + profile.other
    assert profile.total == pytest.approx(spent)
    assert profile.pipeline > 0


def test_requests_that_run_together_share() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_batched_tokens=1 << 20)
    several = replace(request_of("x").params, num_outputs_per_prompt=2, num_inference_steps=STEPS, profile=True)
    both = Request(request_id="both", prompt="a dog", params=several)
    one = request_of("one", steps=STEPS, seed=5, profile=True)
    first, second, nothing = profiles(engine, both, one, request_of("none", steps=STEPS, seed=9))
    assert first is not None and second is not None and nothing is None
    mine, other = part(first, "transformer"), part(second, "transformer")
    batches = pipeline.transformer.batches
    assert isinstance(pipeline.transformer, Denoiser) and max(batches) > 2
    assert mine.runs <= len(batches)  # each once, with both outputs in it
    assert mine.share < mine.seconds and other.share < other.seconds
    assert max(step.calls for step in first.steps) == max(batches)


def test_a_run_counts_once_and_is_shared_by_calls() -> None:
    merged, alone = (lambda: 6.0), (lambda: 1.0)  # a run of six calls, two of each output; and one of one
    outputs = [Span("transformer", "denoise", 4, merged, calls=6, own=2) for _ in range(2)]
    profile = profile_of([*outputs, Span("vae", "decode", None, alone, calls=1, own=1)], 20.0, 3.0, 2.0)
    assert profile == Profile(
        total=20.0,
        queue=3.0,
        computing=7.0,
        pipeline=2.0,
        other=8.0,
        components=[
            ComponentTime("transformer", "denoise", runs=1, seconds=6.0, share=4.0),
            ComponentTime("vae", "decode", runs=1, seconds=1.0, share=1.0),
        ],
        steps=[StepTime(4, runs=1, calls=6, seconds=6.0, share=4.0)],
    )
    assert list(lines_of(profile))[-1] == "step 4: 6.000 in 1 run, its share 4.000"


def test_it_is_a_flag() -> None:
    engine = engine_of(pipeline_of())
    with pytest.raises(InvalidRequestError, match="profile=1: must be true or false"):
        engine.add(request_of("a", profile=1))


def test_answers_and_lines() -> None:
    engine = engine_of(pipeline_of(), max_num_seqs=1)
    engine.add(request_of("a", steps=2, profile=True))
    end = outcome(engine)["a"]
    assert isinstance(end, Finished) and end.profile is not None
    lines = list(lines_of(end.profile))
    assert lines[0].startswith("seconds: ") and lines[-1].startswith("step 1: ") and "decode vae: " in "\n".join(lines)
    output = output_of(request_of("a", profile=True), end)
    assert output.profile == end.profile
    picture = Picture(b"", "png", 1, 1, 0)
    assert RequestProfile.of(end.profile).model_dump_json() in inline([picture], output).decode()
    output.profile = None
    assert b"profile" not in inline([picture], output)

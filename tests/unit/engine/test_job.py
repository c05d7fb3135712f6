"""A job's random numbers, and what it says about itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymux.engine.job import Job, randomness_of
from polymux.errors import InvalidRequestError
from polymux.request import OmniDiffusionSamplingParams, Request


def request(seed: int | None = None, count: int = 1, state: bytes | None = None) -> Request:
    params = OmniDiffusionSamplingParams(seed=seed, num_outputs_per_prompt=count)
    return Request(request_id="a", params=params, generator_state=state)


def first(randomness: Any) -> list[float]:
    return [torch.rand(1, generator=r.generator).item() for r in randomness]


def test_output_i_has_seed_plus_i() -> None:
    made = randomness_of(request(7, 3))
    assert [r.seed for r in made] == [7, 8, 9]
    assert first(made) == [torch.rand(1, generator=torch.Generator().manual_seed(s)).item() for s in (7, 8, 9)]


def test_no_seed_draws_one_and_does_not_touch_the_process_s_generator() -> None:
    before = torch.get_rng_state()
    seeds = {randomness_of(request())[0].seed for _ in range(20)}
    assert len(seeds) == 20 and all(seed is not None and 0 <= seed < 2**32 for seed in seeds)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_s_state_is_output_0_s_and_not_advanced() -> None:
    source = torch.Generator().manual_seed(3)
    torch.rand(5, generator=source)
    state = bytes(source.get_state().numpy().tobytes())
    made, again = (randomness_of(request(count=3, state=state)) for _ in range(2))
    assert made[0].seed is None and None not in [r.seed for r in made[1:]]
    drawn = first(made)
    assert drawn == first(again) and len(set(drawn)) == 3
    assert drawn[0] == torch.rand(1, generator=source).item()
    assert drawn[1:] == [torch.rand(1, generator=torch.Generator().manual_seed(r.seed)).item() for r in made[1:]]


@pytest.mark.parametrize("state", [b"", b"\x00" * 16, b"\x00" * 5056, b"\xff" * 5056, b"\x00" * 5057])
def test_what_is_no_state_is_refused(state: bytes) -> None:
    with pytest.raises(InvalidRequestError) as error:
        randomness_of(request(state=state))
    assert error.value.param == "generator"


def test_a_job_that_has_not_started() -> None:
    job = Job(request(1), randomness_of(request(1)))
    assert not job.complete and job.count == 1
    progress = job.progress()
    assert progress is not None and (progress.phase, progress.step, progress.total) == ("queued", 0, 0)
    assert job.progress() is None, "nothing has changed"
    metrics = job.metrics()
    assert metrics.steps == 0 and metrics.denoise == 0 and 0 <= metrics.queue <= metrics.total

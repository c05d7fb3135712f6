"""Whatever a pipeline does with the results of a step's calls: they run together, and give what they give alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from fake_pipeline import Denoiser, Predict, engine_of, guided, kind_of, outcome, pipeline_of, pixels, request_of, solo


def views_of_both(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    left, right = transformer(latents, t.expand(1), cond)[0].chunk(2, dim=1)
    negative = transformer(latents, t.expand(1), uncond)[0].unbind(0)[0].unsqueeze(0)
    return torch.cat([right, left], dim=1) + negative


def in_place(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    positive = transformer(latents, t.expand(1), cond)[0]
    first = positive[:, :3]
    negative = transformer(latents, t.expand(1), uncond)[0]
    negative -= positive
    first.mul_(2)
    positive[:, 3:] += negative[:, 3:]
    return positive


def other_type(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    positive, negative = (transformer(latents, t.expand(1), e)[0] for e in (cond, uncond))
    return (positive.to(torch.float64) - negative.to(torch.float64)).to(torch.float32)


def joined(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    both = torch.cat([transformer(latents, t.expand(1), e)[0] for e in (cond, uncond)])
    return both[:1] - both[1:] / 2


def by_numpy(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    positive, negative = (transformer(latents, t.expand(1), e)[0] for e in (cond, uncond))
    return torch.from_numpy(positive.numpy() - negative.numpy()) * positive.mean().item()


def branching(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    positive, negative = (transformer(latents, t.expand(1), e)[0] for e in (cond, uncond))
    return positive if bool(positive.mean() > negative.mean()) else negative


def three(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    third = torch.zeros_like(cond)
    positive, negative, nothing = (transformer(latents, t.expand(1), e)[0] for e in (cond, uncond, third))
    return positive + negative - nothing


def unread(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
    transformer(latents, t.expand(1), uncond)
    return transformer(latents, t.expand(1), cond)[0]


TOGETHER = [guided, views_of_both, in_place, other_type, joined, by_numpy, branching, three, unread]


def run_beside(predict: Predict, denoiser: Denoiser | None = None) -> tuple[Any, Any]:
    """Three requests in company, each equal to what the bare pipeline gives."""
    pipeline = pipeline_of(predict=predict)
    if denoiser is not None:
        pipeline.transformer = denoiser
    requests = [request_of(f"r{i}", f"prompt {i}", steps=3 + i, seed=i) for i in range(3)]
    wanted = [solo(pipeline, request) for request in requests]
    pipeline.transformer.batches.clear()
    engine = engine_of(pipeline)
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    for request, want in zip(requests, wanted, strict=True):
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)
    engine.close()
    return pipeline, engine


@pytest.mark.parametrize("predict", TOGETHER)
def test_all_calls_of_a_step_run_together(predict: Predict) -> None:
    pipeline, engine = run_beside(predict)
    calls = 3 if predict is three else 2
    assert max(pipeline.transformer.batches) == 3 * calls
    steps = 3 + 4 + 5
    assert engine.stats.merged["transformer"] >= calls * steps - 3
    assert engine.stats.calls["transformer"] < calls * steps / 3


def test_a_result_that_is_the_next_call_s_argument() -> None:
    def chained(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        first = transformer(latents, t.expand(1), uncond)[0]
        return transformer(first, t.expand(1), cond)[0]

    pipeline, _ = run_beside(chained)
    assert max(pipeline.transformer.batches) == 3


def test_a_result_kept_for_the_next_step() -> None:
    def late(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        momentum = transformer(latents / 2, t.expand(1), uncond)[0][:, :].unsqueeze(0)
        return transformer(latents, t.expand(1), cond)[0] + momentum[0]

    run_beside(late)


def test_results_in_an_output_class() -> None:
    class WithOutput(Denoiser):
        def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            return Transformer2DModelOutput(sample=super().forward(hidden_states, timestep, encoder_hidden_states)[0])

    def attribute(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        positive = transformer(latents, t.expand(1), cond)
        negative = transformer(latents, t.expand(1), uncond)
        return positive.sample + negative[0] - negative["sample"].detach() / 2

    pipeline, _ = run_beside(attribute, WithOutput())
    assert max(pipeline.transformer.batches) == 6


def test_an_argument_changed_between_a_call_and_its_use_ends_that_request_alone() -> None:
    def careless(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        positive = transformer(latents, t.expand(1), cond)[0]
        if cond[0, 0, 0] == ord("z") % 32 / 2:
            latents.mul_(2)
        return positive - transformer(latents, t.expand(1), uncond)[0]

    pipeline = pipeline_of(predict=careless)
    good = request_of("good", "a cat")
    wanted = solo(pipeline, good)
    engine = engine_of(pipeline)
    engine.add(good)
    engine.add(request_of("bad", "zebra"))
    done = outcome(engine)
    assert kind_of(done["bad"]) == "GenerationError"
    assert "changed in place" in done["bad"].error.message  # type: ignore[union-attr]
    np.testing.assert_array_equal(pixels(done["good"]), wanted)


def test_without_company_nothing_is_collected() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=1)
    for name in "ab":
        engine.add(request_of(name))
    outcome(engine)
    assert set(pipeline.transformer.batches) == {1}
    assert engine.stats.calls == engine.stats.merged


def test_a_result_read_by_another_request_is_an_error_not_a_hang() -> None:
    shelf: list[torch.Tensor] = []

    def sharing(transformer: Any, latents: Any, t: Any, cond: Any, uncond: Any) -> torch.Tensor:
        mine = transformer(latents, t.expand(1), cond)[0]
        if shelf:
            return mine + shelf.pop()
        shelf.append(mine)
        return mine + transformer(latents, t.expand(1), uncond)[0]

    pipeline = pipeline_of(predict=sharing)
    engine = engine_of(pipeline)
    engine.add(request_of("first", steps=1))  # learns the shapes
    outcome(engine)
    shelf.clear()
    for name in "ab":
        engine.add(request_of(name, steps=6))
    for _ in range(200):
        engine.step()
    assert not engine.busy

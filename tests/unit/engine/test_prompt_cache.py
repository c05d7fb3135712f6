"""Equal calls of encoders run once, and nobody can tell from the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import (
    LENGTH,
    MadeUpPipeline,
    StableDiffusionPipeline,
    TextEncoder,
    engine_of,
    kind_of,
    outcome,
    pipeline_of,
    pixels,
    request_of,
    solo,
)
from safetensors.torch import save_file

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.request import Finished, LoRARequest

ENTRY = 4096 + LENGTH * 4 * 4  # bytes that the result for a prompt is counted with


def run(engine: DiffusionEngine, *requests: Any) -> dict[str, Any]:
    for request in requests:
        engine.add(request)
    return outcome(engine)


def counts(engine: DiffusionEngine) -> tuple[int, int]:
    return engine.stats.cache_queries["prompt_cache"], engine.stats.cache_hits["prompt_cache"]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_equal_prompts_are_encoded_once(in_flight: int) -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    asked = [request_of(f"r{i}", prompt, seed=i) for i, prompt in enumerate(["a cat", "a dog", "a cat", "a dog"])]
    done = run(engine, *asked) | run(engine, request_of("later", "a dog", seed=9))
    for request in [*asked, request_of("later", "a dog", seed=9)]:
        np.testing.assert_array_equal(pixels(done[request.request_id]), solo(pipeline_of(), request))
    assert sum(pipeline.text_encoder.batches) == 3  # of two prompts, and of the empty one that all are guided away from
    assert counts(engine) == (10, 7)
    assert done["later"].metrics.encode == 0


def test_none_is_kept_if_none_is_wanted() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, prompt_cache_gib=0.0)
    run(engine, request_of("a"), request_of("b"))
    assert sum(pipeline.text_encoder.batches) == 4
    assert engine.stats.cache_queries == {}


def test_of_an_unknown_pipeline_nothing_is_kept() -> None:
    pipeline = pipeline_of(MadeUpPipeline)
    engine = engine_of(pipeline)
    run(engine, request_of("a"), request_of("b"))
    assert sum(pipeline.text_encoder.batches) == 4


class Spoiling(StableDiffusionPipeline):
    """Changes what its encoder has given it."""

    def encode(self, prompt: str) -> torch.Tensor:
        return super().encode(prompt).mul_(2)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_what_a_pipeline_does_to_a_result_is_its_own(in_flight: int) -> None:
    engine = engine_of(pipeline_of(Spoiling), max_num_seqs=in_flight)
    asked = [request_of(f"r{i}", seed=i) for i in range(3)]
    done = run(engine, *asked) | run(engine, request_of("later"))
    for request in [*asked, request_of("later")]:
        np.testing.assert_array_equal(pixels(done[request.request_id]), solo(pipeline_of(Spoiling), request))


class Random(TextEncoder):
    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        (values,) = super().forward(input_ids)
        return (values + torch.rand(len(values), 1, 1),)


def test_what_is_drawn_is_each_request_s_own() -> None:
    pipeline = pipeline_of()
    pipeline.text_encoder = Random()
    engine = engine_of(pipeline, max_num_seqs=4)
    alone = {seed: pixels(run(engine, request_of("a", seed=seed))["a"]) for seed in (0, 1)}
    assert not np.array_equal(alone[0], alone[1])
    done = run(engine, request_of("b", seed=0), request_of("c", seed=1), request_of("d", seed=0))
    for name, seed in (("b", 0), ("c", 1), ("d", 0)):
        np.testing.assert_array_equal(pixels(done[name]), alone[seed])
    assert counts(engine)[1] == 0


class Consuming(TextEncoder):
    """Changes its arguments in place."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        result = super().forward(input_ids)
        input_ids.zero_()
        return result


def test_what_changes_its_arguments_runs_every_time() -> None:
    pipeline = pipeline_of()
    pipeline.text_encoder = Consuming()
    run(engine_of(pipeline, max_num_seqs=1), *(request_of(name, negative_prompt="a dog") for name in "ab"))
    assert sum(pipeline.text_encoder.batches) == 4


class Failing(TextEncoder):
    """Fails at its first call."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        result = super().forward(input_ids)
        if len(self.batches) == 1:
            raise ValueError("not now")
        return result


def test_an_error_is_of_the_call_that_had_it() -> None:
    pipeline = pipeline_of()
    pipeline.text_encoder = Failing()
    engine = engine_of(pipeline, max_num_seqs=4)
    done = run(engine, request_of("a"), request_of("b"), request_of("c"))
    assert kind_of(done["a"]) == "GenerationError"
    for name in "bc":
        np.testing.assert_array_equal(pixels(done[name]), solo(pipeline_of(), request_of(name)))


def test_who_leaves_takes_nobody_s_answer_along() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=4)
    for name in "abc":
        engine.add(request_of(name))
    engine._admit()
    for job in list(engine.jobs.values()):
        engine._advance(job.sessions[0])
    assert len(engine.scheduler.waiting) == 1  # the others wait for it
    engine.abort("a")
    assert [call.owner.request_id for call in engine.scheduler.waiting] == ["b"]
    engine.abort("c")
    done = outcome(engine)
    np.testing.assert_array_equal(pixels(done["b"]), solo(pipeline_of(), request_of("b")))
    assert pipeline.text_encoder.batches == [1, 1]
    assert not engine.encoded._waiting


def test_the_least_recently_used_goes_first() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, prompt_cache_gib=2.5 * ENTRY / 2**30)

    def encoded(prompt: str) -> int:
        before = sum(pipeline.text_encoder.batches)
        run(engine, request_of("r", prompt, negative_prompt=prompt))
        assert engine.encoded.size <= 2 * ENTRY
        return sum(pipeline.text_encoder.batches) - before

    assert [encoded(prompt) for prompt in ("a", "b", "a", "c", "a", "b")] == [1, 1, 0, 1, 0, 1]


def test_what_is_larger_than_the_cache_is_shared_and_not_kept() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline, max_num_seqs=4, prompt_cache_gib=0.5 * ENTRY / 2**30)
    for expected in (2, 4):
        run(engine, request_of("a"), request_of("b"))
        assert sum(pipeline.text_encoder.batches) == expected
    assert engine.encoded.size == 0


def test_the_warm_up_leaves_nothing() -> None:
    engine = engine_of(pipeline_of())
    engine.warm_up()
    assert (counts(engine), engine.encoded.size) == ((0, 0), 0)


def test_a_deep_sleep_forgets(tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("flux-dev")), device="cpu")
    engine = DiffusionEngine.load(config)
    size = dict(height=64, width=64, steps=1)
    want = pixels(run(engine, request_of("a", **size))["a"])
    engine.sleep(1)
    engine.wake_up()
    np.testing.assert_array_equal(pixels(run(engine, request_of("b", **size))["b"]), want)
    assert counts(engine) == (4, 2)
    engine.sleep(2)
    engine.wake_up()
    np.testing.assert_array_equal(pixels(run(engine, request_of("c", **size))["c"]), want)
    assert counts(engine) == (6, 2)
    engine.close()


def test_adapters_of_an_encoder_are_part_of_the_question(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = "text_model.encoder.layers.0.self_attn.q_proj"
    checkpoint = tiny_checkpoint("sdxl")
    engine = DiffusionEngine.load(EngineConfig.from_flat(model=str(checkpoint), device="cpu"))
    weight = engine.pipeline.text_encoder.get_submodule(path.removeprefix("text_model.")).weight
    torch.manual_seed(0)
    for name in ("one", "two"):
        down, up = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
        state = {f"text_encoder.{path}.lora_A.weight": down, f"text_encoder.{path}.lora_B.weight": up}
        save_file(state, tmp_path / f"{name}.safetensors")

    def picture(*loras: LoRARequest) -> np.ndarray[Any, Any]:
        done = run(engine, request_of("r", height=64, width=64, steps=1, lora=loras))["r"]
        assert isinstance(done, Finished), done
        return pixels(done)

    asked = [
        LoRARequest(path=str(tmp_path / f"{name}.safetensors"), scale=s) for name in ("one", "two") for s in (1, 2)
    ]
    plain = picture()
    first = [picture(lora) for lora in asked]
    assert len({array.tobytes() for array in [plain, *first]}) == 5
    hits = counts(engine)[1]
    for lora, want in zip(asked, first, strict=True):
        np.testing.assert_array_equal(picture(lora), want)
    np.testing.assert_array_equal(picture(), plain)
    assert counts(engine)[1] - hits == 5 * 2  # two encoders
    engine.close()

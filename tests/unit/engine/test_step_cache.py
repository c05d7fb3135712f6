"""The first-block cache: what diffusers computes with it, for each request by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig
from fake_pipeline import engine_of, outcome, pipeline_of, pixels, request_of

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.loading import load_pipeline
from polymux.request import LoRARequest
from polymux.testing.tiny import TINY

Checkpoint = Callable[..., Path]
Array = np.ndarray[Any, Any]
GUIDED: dict[str, Any] = {"negative_prompt": "a dog", "true_cfg_scale": 3.0}
SIZE = dict(height=64, width=64)
THRESHOLD = 0.9  # random weights change a lot from step to step: some steps are below, some above


def load(checkpoint: Path, threshold: float | None = None, **knobs: Any) -> DiffusionEngine:
    cache = {} if threshold is None else {"cache_backend": "first_block", "cache_config": {"threshold": threshold}}
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(checkpoint), device="cpu", **cache, **knobs))


def generate(engine: DiffusionEngine, prompt: str = "a cat", seed: int = 0, steps: int = 6, **params: Any) -> Array:
    engine.add(request_of("one", prompt, steps=steps, seed=seed, **SIZE, **params))
    return pixels(outcome(engine)["one"])


def by_diffusers(checkpoint: Path, threshold: float, prompt: str, seed: int, steps: int) -> Array:
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    result = pipeline(
        prompt=prompt, num_inference_steps=steps, generator=torch.Generator().manual_seed(seed), output_type="np",
        **SIZE, **GUIDED,
    )  # fmt: skip
    return np.asarray(result.images[0])


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("qwen-image")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[DiffusionEngine]:
    engine = load(checkpoint, THRESHOLD, max_num_seqs=4)
    yield engine
    engine.close()


def test_as_diffusers_does(engine: DiffusionEngine, checkpoint: Path) -> None:
    before = engine.stats
    got = generate(engine, seed=3, **GUIDED)
    np.testing.assert_allclose(got, by_diffusers(checkpoint, THRESHOLD, "a cat", 3, 6), atol=5e-6)
    asked = engine.stats.cache_queries["first_block"] - before.cache_queries["first_block"]
    answered = engine.stats.cache_hits["first_block"] - before.cache_hits["first_block"]
    assert asked == 12 and 0 < answered < asked


@pytest.mark.parametrize("name", ["qwen-image", "flux-dev", "wan22-t2v-moe", "ltx-video"])
def test_at_threshold_zero_nothing_changes(name: str, tiny_checkpoint: Checkpoint) -> None:
    checkpoint = tiny_checkpoint(name)
    config = EngineConfig.from_flat(model=str(checkpoint), device="cpu")
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(TINY[name].load))
    extra = {"num_frames": 9} if "num_frames" in TINY[name].call else {}
    outputs = []
    for cache in ({}, {"cache_backend": "first_block", "cache_config": {"threshold": 0.0}}, {}):
        flat = EngineConfig.from_flat(model=name, max_num_seqs=1, **cache)
        engine = DiffusionEngine(flat, pipeline, torch.device("cpu"))
        outputs.append(generate(engine, steps=3, **extra))
        assert engine.stats.cache_hits.get("first_block", 0) == 0
        engine.close()
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


def test_requests_in_flight_keep_to_themselves(engine: DiffusionEngine) -> None:
    """Of equal prompts too, whose guidance branches have the same names."""
    asked = [("a", "a cat", 0, 6), ("b", "a cat", 1, 8), ("c", "a red house by the sea", 2, 5), ("d", "a cat", 0, 6)]
    alone = {name: generate(engine, prompt, seed, steps, **GUIDED) for name, prompt, seed, steps in asked}
    for name, prompt, seed, steps in asked:
        engine.add(request_of(name, prompt, steps=steps, seed=seed, **SIZE, **GUIDED))
    engine.add(request_of("gone", "a cat", steps=6, seed=5, **SIZE, **GUIDED))
    while engine.stats.steps < 8:
        engine.step()
    engine.abort("gone")
    done = outcome(engine)
    for name, want in alone.items():
        np.testing.assert_allclose(pixels(done[name]), want, atol=2e-5)
    for cached in engine.runner.step_cache._cached.values():
        assert [manager._state_cache for manager in cached.managers] == [{}] * len(cached.managers)


def test_a_larger_threshold_leaves_more_out(checkpoint: Path) -> None:
    counts = []
    for threshold in (0.0, THRESHOLD, 10.0):
        engine = load(checkpoint, threshold)
        generate(engine, **GUIDED)
        counts.append(engine.stats.cache_hits["first_block"])
        engine.close()
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, 2 * 5)  # each branch must run once


def test_after_the_weights_were_dropped(checkpoint: Path) -> None:
    engine = load(checkpoint, THRESHOLD)
    want = generate(engine, **GUIDED)
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        np.testing.assert_allclose(generate(engine, **GUIDED), want, atol=5e-6)
    engine.close()


def test_with_an_adapter(checkpoint: Path, engine: DiffusionEngine, tiny_lora: Callable[[str], Path]) -> None:
    plain = generate(engine, **GUIDED)
    lora = (LoRARequest(path=str(tiny_lora("qwen-image"))),)
    other = generate(engine, lora=lora, **GUIDED)
    assert not np.array_equal(other, plain)
    np.testing.assert_array_equal(generate(engine, **GUIDED), plain)
    np.testing.assert_array_equal(generate(engine, lora=lora, **GUIDED), other)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sd15", "unet: diffusers has no caches for UNet2DConditionModel"),
        ("flux2-klein", "transformer: some blocks of Flux2Transformer2DModel return text and picture apart"),
        ("z-image", "transformer: diffusers has no caches for ZImageTransformer2DModel"),
        ("acestep", r"transformer: diffusers' hooks do not know the blocks of AceStepTransformer1DModel \(AceStepTr"),
    ],
)
def test_models_that_cannot(name: str, said: str, tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=f"--cache-backend first_block: {said}"):
        load(tiny_checkpoint(name), 0.1)


def test_pipelines_that_do_not_name_their_branches(tiny_checkpoint: Checkpoint) -> None:
    engine = load(tiny_checkpoint("flux-fill"), 0.1)
    with pytest.raises(ConfigError, match="does not say which branch of guidance a call of transformer belongs to"):
        engine.warm_up()
    engine.close()


def test_a_fake_is_no_model_of_diffusers() -> None:
    with pytest.raises(ConfigError, match="diffusers has no caches for Denoiser"):
        engine_of(pipeline_of(), cache_backend="first_block")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"cache_config": {"threshold": 0.1}}, "acts only with --cache-backend"),
        ({"cache_backend": "tea_cache"}, "allowed are none, first_block"),
        ({"cache_backend": "first_block", "cache_config": {"thresh": 1}}, "unknown 'thresh'"),
        ({"cache_backend": "first_block", "cache_config": {"threshold": -1}}, "threshold=-1: must be"),
        ({"cache_backend": "first_block", "cache_config": {"threshold": True}}, "threshold=True: must be"),
        ({"cache_backend": "first_block", "enable_layerwise_offload": True}, "exclude each other"),
        ({"cache_backend": "first_block", "gpu_memory_limit_gib": "auto"}, "exclude each other"),
    ],
)
def test_what_does_not_go(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_flat(model="m", **knobs)

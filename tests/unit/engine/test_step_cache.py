"""Caches of denoising steps: what diffusers computes with them, for each request by itself.

That they leave everything as it is where they leave nothing out, for every family: tests/parity/test_step_caches.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from fake_pipeline import engine_of, outcome, pipeline_of, pixels, request_of

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.request import LoRARequest

Checkpoint = Callable[..., Path]
Array = np.ndarray[Any, Any]
GUIDED: dict[str, Any] = {"negative_prompt": "a dog", "true_cfg_scale": 3.0}
SIZE = dict(height=64, width=64)
THRESHOLD = 0.9  # random weights change a lot from step to step: some steps are below, some above


RATIOS = [1.0, 1.1, 1.05, 0.97, 1.02, 0.9]
OTHERS: dict[str, dict[str, Any]] = {  # settings with which some steps are left out and some are not
    "mag_cache": {"mag_threshold": 0.12, "mag_max_skip_steps": 2, "mag_ratios": RATIOS},
    "tea_cache": {"rel_l1_thresh": 0.5, "coefficients": [0.3]},
    "taylorseer": {"cache_interval": 3, "disable_cache_before_step": 2},
    "pab": {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": [0, 900]},
    "cache_dit": {"residual_diff_threshold": 1, "max_warmup_steps": 2, "max_continuous_cached_steps": 1},
}


def load(checkpoint: Path, threshold: float | None = None, **knobs: Any) -> DiffusionEngine:
    cache = {} if threshold is None else {"cache_backend": "first_block", "cache_config": {"threshold": threshold}}
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(checkpoint), device="cpu", **cache, **knobs))


def generate(engine: DiffusionEngine, prompt: str = "a cat", seed: int = 0, steps: int = 6, **params: Any) -> Array:
    engine.add(request_of("one", prompt, steps=steps, seed=seed, **SIZE, **params))
    return pixels(outcome(engine)["one"])


def by_diffusers(checkpoint: Path, config: Callable[[Any], Any]) -> Array:
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.enable_cache(config(pipeline))
    result = pipeline(
        prompt="a cat", num_inference_steps=6, generator=torch.Generator().manual_seed(3), output_type="np",
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
    want = by_diffusers(checkpoint, lambda pipeline: FirstBlockCacheConfig(threshold=THRESHOLD))
    np.testing.assert_allclose(got, want, atol=5e-6)
    asked = engine.stats.cache_queries["first_block"] - before.cache_queries["first_block"]
    answered = engine.stats.cache_hits["first_block"] - before.cache_hits["first_block"]
    assert asked == 12 and 0 < answered < asked


DIFFUSERS: dict[str, Callable[[Any], Any]] = {
    "mag_cache": lambda pipeline: MagCacheConfig(
        threshold=0.12, max_skip_steps=2, retention_ratio=0.1, num_inference_steps=6, mag_ratios=RATIOS
    ),
    "taylorseer": lambda pipeline: TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, use_lite_mode=True, taylor_factors_dtype=torch.float32
    ),
}


@pytest.mark.parametrize("backend", OTHERS)
def test_other_backends(backend: str, checkpoint: Path) -> None:
    """As diffusers computes it, if it can with guidance; and in flight at once as alone."""
    if backend == "cache_dit":
        pytest.importorskip("cache_dit")
    engine = load(checkpoint, cache_backend=backend, cache_config=OTHERS[backend], max_num_seqs=4)
    alone = [generate(engine, seed=3, **GUIDED), generate(engine, "a house", 4, 8, **GUIDED)]
    if backend in DIFFUSERS:
        np.testing.assert_allclose(alone[0], by_diffusers(checkpoint, DIFFUSERS[backend]), atol=5e-6)
    assert 0 < engine.stats.cache_hits[backend] < engine.stats.cache_queries[backend] == 2 * (6 + 8)
    engine.add(request_of("a", "a cat", steps=6, seed=3, **SIZE, **GUIDED))
    engine.add(request_of("b", "a house", steps=8, seed=4, **SIZE, **GUIDED))
    done = outcome(engine)
    for name, want in zip("ab", alone, strict=True):
        np.testing.assert_allclose(pixels(done[name]), want, atol=2e-5)
    cached = engine.runner.step_cache._cached["transformer"]
    assert not any(manager._state_cache for manager in cached.managers)
    assert not vars(cached).get("_memories")
    engine.close()


def test_attention_broadcast_without_guidance(tiny_checkpoint: Checkpoint) -> None:
    """diffusers keeps one memory for all branches of guidance; where there is one branch, it is the same."""
    checkpoint = tiny_checkpoint("flux-dev")
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    ranges = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (0, 900)}
    pipeline.transformer.enable_cache(
        PyramidAttentionBroadcastConfig(**ranges, current_timestep_callback=lambda: pipeline.current_timestep)
    )
    generator = torch.Generator().manual_seed(0)
    want = pipeline(prompt="a cat", num_inference_steps=6, generator=generator, output_type="np", **SIZE).images[0]
    engine = load(checkpoint, cache_backend="pab", cache_config=ranges)
    np.testing.assert_allclose(generate(engine), want, atol=5e-6)
    assert 0 < engine.stats.cache_hits["pab"] < 6
    engine.close()


def test_tea_cache_adds_again_what_the_blocks_added(tiny_checkpoint: Checkpoint) -> None:
    """Against a loop over the blocks by hand. With this polynomial it is every second step that is left out."""
    checkpoint = tiny_checkpoint("flux-dev")
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    first, *_, last = [*pipeline.transformer.transformer_blocks, *pipeline.transformer.single_transformer_blocks]
    steps, entered = [0], {}
    added: dict[str, Any] = {}

    def left_out() -> bool:
        return steps[0] in (1, 3)

    def before(block: Any, args: Any, kwargs: Any) -> None:
        entered.update(picture=kwargs["hidden_states"], text=kwargs["encoder_hidden_states"])

    def after(block: Any, args: Any, kwargs: Any, output: Any) -> Any:
        text, picture = output
        if left_out():
            text, picture = entered["text"] + added["text"], entered["picture"] + added["picture"]
        else:
            added.update(picture=picture - entered["picture"], text=text - entered["text"])
        steps[0] += 1
        return text, picture

    first.register_forward_pre_hook(before, with_kwargs=True)
    last.register_forward_hook(after, with_kwargs=True)
    generator = torch.Generator().manual_seed(0)
    want = pipeline(prompt="a cat", num_inference_steps=6, generator=generator, output_type="np", **SIZE).images[0]
    engine = load(checkpoint, cache_backend="tea_cache", cache_config=OTHERS["tea_cache"])
    np.testing.assert_allclose(generate(engine), want, atol=5e-6)
    assert engine.stats.cache_hits["tea_cache"] == 2
    engine.close()


@pytest.mark.parametrize(
    ("backend", "measure", "key", "much"),
    [
        ("mag_cache", {"mag_calibrate": True}, "mag_ratios", {"mag_threshold": 10}),
        ("tea_cache", {"calibrate": True}, "coefficients", {"rel_l1_thresh": 100}),
    ],
)
def test_measuring(
    backend: str,
    measure: dict[str, Any],
    key: str,
    much: dict[str, Any],
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = load(checkpoint)
    want = generate(plain, steps=8, **GUIDED)
    plain.close()
    engine = load(checkpoint, cache_backend=backend, cache_config=measure)
    with caplog.at_level(logging.INFO, "polymux"):
        np.testing.assert_allclose(generate(engine, steps=8, **GUIDED), want, atol=2e-5)
    engine.close()
    (said,) = [message for message in caplog.messages if "measured" in message]
    config = json.loads(said.partition("--cache-config '")[2].rstrip("'"))
    assert list(config) == [key] and len(config[key]) == {"mag_ratios": 8, "coefficients": 5}[key]
    engine = load(checkpoint, cache_backend=backend, cache_config=config | much)
    generate(engine, steps=8, **GUIDED)
    assert engine.stats.cache_hits[backend] > 0
    engine.close()


def test_steps_of_two_denoisers_are_those_of_the_request(tiny_checkpoint: Checkpoint) -> None:
    """The second one sees the last steps alone, whose ratios let all be left out but its first."""
    ratios = [5.0] * 4 + [1.0] * 4
    cache = {"mag_threshold": 0.5, "mag_retention_ratio": 0, "mag_ratios": ratios}
    engine = load(tiny_checkpoint("wan22-t2v-moe"), cache_backend="mag_cache", cache_config=cache)
    engine.add(request_of("a", "a cat", steps=8, num_frames=9, **SIZE))
    outcome(engine)
    assert (engine.stats.calls["transformer"], engine.stats.calls["transformer_2"]) == (2 * 6, 2 * 2)
    assert engine.stats.cache_hits["mag_cache"] == 2 * 2 + 2 * 1
    engine.close()


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
    engine = load(tiny_checkpoint("flux-modular"), 0.1)
    with pytest.raises(ConfigError, match="does not say which branch of guidance a call of transformer belongs to"):
        engine.warm_up()
    engine.close()


def test_families_that_no_test_has_seen(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="it is not validated for the family flux-fill; no cache backend is"):
        load(tiny_checkpoint("flux-fill"), 0.1)


@pytest.mark.parametrize(
    ("model", "backend", "config", "said"),
    [
        ("qwen-image", "mag_cache", {}, "no mag_ratios are known for qwen-image: measure them with mag_calibrate"),
        ("wan22-t2v-moe", "tea_cache", {}, "no coefficients are known for this wan: measure them with calibrate"),
        (
            "qwen-image",
            "pab",
            {"spatial_attention_block_skip_range": None, "temporal_attention_block_skip_range": 2},
            "",
        ),
    ],
)
def test_what_is_not_known(model: str, backend: str, config: Any, said: str, tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=f"--cache-backend {backend}: .*{said}"):
        load(tiny_checkpoint(model), cache_backend=backend, cache_config=config).warm_up()


def test_a_fake_is_no_model_of_diffusers() -> None:
    with pytest.raises(ConfigError, match="diffusers has no caches for Denoiser"):
        engine_of(pipeline_of(), cache_backend="first_block")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"cache_config": {"threshold": 0.1}}, "acts only with --cache-backend"),
        (
            {"cache_backend": "sea_cache"},
            "allowed are none, first_block, mag_cache, tea_cache, taylorseer, pab, cache_",
        ),
        ({"cache_backend": "first_block", "cache_config": {"thresh": 1}}, "unknown field `thresh`; .* knows threshold"),
        ({"cache_backend": "first_block", "cache_config": {"threshold": -1}}, r">= 0.0 - at `\$.threshold`"),
        ({"cache_backend": "first_block", "cache_config": {"threshold": True}}, "Expected `float`, got `bool`"),
        ({"cache_backend": "first_block", "cache_config": {"threshold": float("nan")}}, "threshold"),
        ({"cache_backend": "tea_cache", "cache_config": {"threshold": 1}}, "knows rel_l1_thresh, coefficients, calib"),
        ({"cache_backend": "tea_cache", "cache_config": {"coefficients": []}}, "length >= 1"),
        ({"cache_backend": "tea_cache", "cache_config": {"coefficients": [1], "calibrate": True}}, "both are given"),
        ({"cache_backend": "mag_cache", "cache_config": {"mag_ratios": [1], "mag_calibrate": True}}, "both are given"),
        ({"cache_backend": "mag_cache", "cache_config": {"mag_ratios": [0]}}, "> 0.0"),
        (
            {"cache_backend": "mag_cache", "cache_config": {"mag_threshold": 0.24, "mag_calibrate": True}},
            "mag_threshold does not act with mag_calibrate",
        ),
        (
            {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 1, "calibrate": True}},
            "rel_l1_thresh does not act with calibrate",
        ),
        ({"cache_backend": "taylorseer", "cache_config": {"cache_interval": 0}}, ">= 1"),
        ({"cache_backend": "pab", "cache_config": {"spatial_attention_block_skip_range": None}}, "must be a number"),
        ({"cache_backend": "cache_dit", "cache_config": {"Fn_compute_blocks": 0}}, ">= 1"),
        ({"cache_backend": "cache_dit", "cache_config": {"taylorseer_order": 2}}, "acts only with enable_taylorseer"),
        (
            {"cache_backend": "pab", "cache_config": {"spatial_attention_timestep_skip_range": [800, 100]}},
            r"spatial_attention_timestep_skip_range \[800, 100\]: the first must be below the second",
        ),
        (
            {"cache_backend": "pab", "cache_config": {"cross_attention_timestep_skip_range": [0, 800]}},
            "acts only with cross_attention_block_skip_range",
        ),
        (
            {
                "cache_backend": "taylorseer",
                "cache_config": {"disable_cache_before_step": 5, "disable_cache_after_step": 5},
            },
            "must be above disable_cache_before_step 5",
        ),
        ({"cache_backend": "tea_cache", "cache_config": {"coefficients": [float("nan")]}}, "coefficients"),
        ({"cache_backend": "tea_cache", "cache_config": {"coefficients": [float("inf")]}}, "coefficients"),
        ({"cache_backend": "first_block", "enable_layerwise_offload": True}, "exclude each other"),
        ({"cache_backend": "first_block", "gpu_memory_limit_gib": "auto"}, "exclude each other"),
    ],
)
def test_what_does_not_go(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_flat(model="m", **knobs)

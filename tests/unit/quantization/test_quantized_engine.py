"""Quantized components in an engine: with offload, adapters, the runtime cache and sleep, and side by side."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_engines import OFFLOAD, ROUNDING, Array, add, apart, engine, picture, run, transformer, unquantized

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.quantization.layer import PackedLinear
from polymux.request import Finished

DYNAMIC = {"diffusion_quantization_config": {"method": "int8", "activation_scheme": "dynamic"}}
CHOICES: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "int8, dynamic": DYNAMIC,
    "nf4": {"quantization": "nf4"},
}

# Of pixels from 0 to 1, on average. The picture is smaller than any that the model was trained on.
AFTER_ONE_STEP = {"fp8": 0.03, "int8": 0.01, "int4": 0.1, "nf4": 0.4, "fp4": 0.4}


@pytest.mark.parametrize("method", AFTER_ONE_STEP)
def test_the_picture_is_that_of_the_weights_unpacked(method: str) -> None:
    quantized = engine(quantization=method)
    got = picture(quantized, steps=1)
    unquantized(quantized)
    assert apart(got, picture(quantized, steps=1)) <= ROUNDING
    apart_by = np.abs(got - picture(engine(), steps=1)).mean()
    assert 1e-4 < apart_by < AFTER_ONE_STEP[method], "it does something, and not too much"


def test_memory_is_smaller_and_what_runs_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain, small = engine(), engine(diffusion_quantization_config={"transformer": "int4", "text_encoder": "int8"})
    sizes = [{c.name: sum(p.nbytes for p in c.module.parameters()) for c in e.components} for e in (plain, small)]
    assert sizes[1]["transformer"] < 0.35 * sizes[0]["transformer"]
    assert sizes[1]["text_encoder"] < 0.9 * sizes[0]["text_encoder"], "most of it are embeddings"
    assert sizes[1]["vae"] == sizes[0]["vae"]
    assert small.described.quantized == {"transformer": "int4, weights only", "text_encoder": "int8, weights only"}
    assert (plain.described.quantized, small.described.parameters) == ({}, plain.described.parameters)
    assert small.described.dtype == "float32"
    assert {"quantization", "gguf", "lora", "first_block", "layerwise_offload"} < set(plain.described.features)
    assert small.described.features == plain.described.features
    assert "quantization: transformer: 84 of 90 linear layers in int4, weights only; their weights take" in caplog.text


def test_what_the_device_cannot_do_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine(quantization="fp8").close()
    reason = "fp8 products need a GPU of compute capability 8.9, and the device is cpu"
    assert "in fp8, weights only" in caplog.text and reason in caplog.text


@pytest.mark.parametrize("choice", CHOICES)
def test_offload_adapters_and_sleep(
    choice: str, tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path], swap_all: None
) -> None:
    folder, lora = tiny_checkpoint("qwen-image"), tiny_lora("qwen-image")
    pictures: dict[str, list[Array]] = {}
    for name, flags in OFFLOAD.items():
        at = engine(folder, **CHOICES[choice], **flags)
        made = [picture(at), picture(at, lora=lora), picture(at)]
        assert apart(made[0], made[2]) == 0, "an adapter leaves nothing behind"
        at.sleep(1)
        at.wake_up()
        assert apart(picture(at, lora=lora), made[1]) == 0
        pictures[name] = made
        at.close()
    for made in pictures.values():
        assert all(apart(one, other) <= ROUNDING for one, other in zip(made, pictures["resident"], strict=True))
    plain = engine(folder)
    effect = picture(plain, lora=lora) - picture(plain)
    there = pictures["resident"][1] - pictures["resident"][0]
    assert np.corrcoef(effect.ravel(), there.ravel())[0, 1] > 0.7, "the adapter does what it does without"


@pytest.mark.parametrize("method", ["int4", "nf4"])
def test_an_adapter_of_the_first_request_under_offload(
    method: str, tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path], swap_all: None
) -> None:
    """The layers that it is put beside are not on the device yet."""
    folder, lora = tiny_checkpoint("qwen-image"), tiny_lora("qwen-image")
    at = engine(folder, quantization=method, enable_cpu_offload=True)
    got = picture(at, lora=lora)
    at.close()
    assert apart(got, picture(engine(folder, quantization=method), lora=lora)) <= ROUNDING


def test_the_runtime_cache_keeps_what_is_quantized(tmp_path: Path) -> None:
    cache = {
        "enable_distributed_layerwise_offload": True,
        "dlo_enable_runtime_cache": True,
        "dlo_runtime_cache_dir": str(tmp_path),
    }
    for choice in ("fp8", "nf4"):
        expected = picture(engine(quantization=choice))
        for hits in (0, 1):
            at = engine(quantization=choice, **cache)
            assert at.loaded.cache_hits == {"runtime_cache": hits}, "another choice is another entry"
            assert apart(picture(at), expected) <= ROUNDING
            at.close()
    ignoring = {"method": "fp8", "ignored_layers": ["*.attn"]}
    at = engine(diffusion_quantization_config=ignoring, **cache)
    assert at.loaded.cache_hits == {"runtime_cache": 0}


def test_engines_in_one_process_do_not_share_a_choice() -> None:
    alone = {name: picture(engine(**settings)) for name, settings in [("plain", {}), *CHOICES.items()]}
    together = {name: engine(**settings) for name, settings in [("plain", {}), *CHOICES.items()]}
    for at in together.values():
        add(at)
    made: dict[str, Array] = {}
    while any(at.busy for at in together.values()):
        for name, at in together.items():
            for event in at.step() if at.busy else ():
                if isinstance(event, Finished):
                    made[name] = from_wire(event.outputs[0][0])
    for name, expected in alone.items():
        assert apart(made[name], expected) <= ROUNDING, name


def test_requests_in_flight_are_merged_as_ever() -> None:
    at = engine(**DYNAMIC)
    alone = [picture(at, seed=seed, steps=1) for seed in (1, 2, 3)]
    for seed in (1, 2, 3):
        add(at, str(seed), seed, steps=1)
    together = run(at)
    assert max(size for runs in at.stats.runs if runs.component == "transformer" for size in runs.batches) == 3
    for seed, expected in zip("123", alone, strict=True):
        assert apart(together[seed], expected) <= 5e-3, "an input may round the other way"


def test_ignored_layers_stay_as_they_are() -> None:
    given = {
        "method": "int8",
        "ignored_layers": ["transformer_blocks.0", "*.attn.to_q", "transformer_blocks.1.img_mlp.net.2"],
    }
    at = engine(diffusion_quantization_config=given)
    packed = {path for path, layer in transformer(at).named_modules() if isinstance(layer, PackedLinear)}
    assert packed and not any(path.startswith("transformer_blocks.0.") for path in packed)
    assert not any(path.endswith("attn.to_q") for path in packed) and "transformer_blocks.1.attn.to_k" in packed
    assert "transformer_blocks.1.img_mlp.net.2" not in packed


def test_what_is_outside_of_the_blocks_stays_as_it_is() -> None:
    at = engine(quantization="int8")
    for path, layer in transformer(at).named_modules():
        if isinstance(layer, torch.nn.Linear):
            assert isinstance(layer, PackedLinear) == path.startswith("transformer_blocks."), path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"diffusion_quantization_config": {"unet": "int8"}}, "no component 'unet' with weights; there are"),
        ({"diffusion_quantization_config": {"scheduler": "int8"}}, "no component 'scheduler' with weights"),
        (
            {"diffusion_quantization_config": {"method": "int8", "ignored_layers": ["blocks.0"]}},
            "no linear layer 'blocks.0'",
        ),
        ({"diffusion_quantization_config": {"method": "int8", "ignored_layers": ["*"]}}, "no linear layer to quantize"),
        ({"diffusion_quantization_config": {"vae": "int8"}}, "no linear layer to quantize"),
        ({"diffusion_quantization_config": {"method": "fp8", "activation_scheme": "dynamic"}}, "the device is cpu"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(**settings)
    assert words in caught.value.message


def test_a_pipeline_that_is_loaded_already_is_refused() -> None:
    config = EngineConfig.from_flat(model="demo", quantization="int8")
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="was loaded without it"):
        DiffusionEngine(config, pipeline, torch.device("cpu"))
    with pytest.raises(ConfigError, match="given ready-made"):
        settings = {"diffusion_quantization_config": {"transformer": "int8"}}
        DiffusionEngine.load(EngineConfig.from_flat(model="demo", **settings), {"transformer": pipeline.transformer})


def test_random_weights_are_quantized_too() -> None:
    at = engine(quantization="int4", load_format="dummy")
    assert at.described.quantized == {"transformer": "int4, weights only"}
    assert np.isfinite(picture(at)).all()
    at.close()
    gc.collect()

"""--lora-backend distill: the weights themselves change, once, as diffusers' own fusing changes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from fake_pipeline import outcome, pixels
from fake_pipeline import request_of as plain_request

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.request import LoRARequest, Request

Array = np.ndarray[Any, Any]
NAME, MOE = "qwen-image", "wan22-t2v-moe"


def load(checkpoint: Path, *lora_path: str, **knobs: Any) -> DiffusionEngine:
    config = EngineConfig.from_flat(model=str(checkpoint), lora_path=lora_path, max_num_seqs=4, **knobs)
    return DiffusionEngine.load(config)


def request_of(*lora: LoRARequest, **params: Any) -> Request:
    return plain_request("one", lora=lora, **{"steps": 2, "height": 64, "width": 64} | params)


def generate(engine: DiffusionEngine, *lora: LoRARequest, **params: Any) -> Array:
    engine.add(request_of(*lora, **params))
    return pixels(outcome(engine)["one"])


def weights(engine: DiffusionEngine, part: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in getattr(engine.model.pipeline, part).state_dict().items()}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(NAME)


@pytest.fixture(scope="module")
def file(tiny_lora: Callable[[str], Path]) -> Path:
    return tiny_lora(NAME)


@pytest.fixture(scope="module")
def fused(checkpoint: Path, file: Path) -> DiffusionEngine:
    return load(checkpoint, str(file), lora_scale=0.5, lora_backend="distill")


def test_the_weights_are_those_that_diffusers_fuses(fused: DiffusionEngine, checkpoint: Path, file: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name="a")
    pipeline.fuse_lora(components=["transformer"], lora_scale=0.5, adapter_names=["a"])
    pipeline.unload_lora_weights()
    want, got = pipeline.transformer.state_dict(), weights(fused, "transformer")
    assert want.keys() == got.keys()  # nothing lies beside the layers
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_the_picture_is_that_of_the_adapter(fused: DiffusionEngine, checkpoint: Path, file: Path) -> None:
    plain = load(checkpoint)
    want = generate(plain, LoRARequest(path=str(file), scale=0.5))
    without = generate(plain)
    plain.close()
    assert np.abs(want - without).max() > 1e-3
    np.testing.assert_allclose(generate(fused), want, atol=1e-4)


def test_adapters_of_requests_come_on_top(fused: DiffusionEngine, file: Path) -> None:
    before = generate(fused)
    more = generate(fused, LoRARequest(path=str(file), scale=0.5))
    assert np.abs(more - before).max() > 1e-3
    np.testing.assert_array_equal(generate(fused), before)


@pytest.mark.parametrize("knobs", [{"enable_cpu_offload": True}, {"enable_layerwise_offload": True}], ids=str)
def test_with_offload_and_after_sleep(
    fused: DiffusionEngine, checkpoint: Path, file: Path, knobs: dict[str, Any]
) -> None:
    offloaded = load(checkpoint, str(file), lora_scale=0.5, lora_backend="distill", **knobs)
    want = generate(fused)
    np.testing.assert_allclose(generate(offloaded), want, atol=5e-6)
    offloaded.sleep(2)
    offloaded.wake_up()
    np.testing.assert_allclose(generate(offloaded), want, atol=5e-6)
    offloaded.close()


def test_two_denoisers_have_files_of_their_own(
    tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path]
) -> None:
    checkpoint, file = tiny_checkpoint(MOE), tiny_lora(MOE)
    with pytest.raises(ConfigError, match="two denoisers: transformer=FILE or transformer_2=FILE"):
        load(checkpoint, str(file), lora_backend="distill")
    plain = load(checkpoint)
    engine = load(checkpoint, f"transformer_2={file}", lora_backend="distill")
    one, other = weights(engine, "transformer"), weights(engine, "transformer_2")
    assert all(torch.equal(one[name], value) for name, value in weights(plain, "transformer").items())
    assert not all(torch.equal(other[name], value) for name, value in weights(plain, "transformer_2").items())
    plain.close()
    engine.close()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lora_backend": "distill"}, "--lora-backend distill acts only with --lora-path"),
        ({"lora_backend": "fused", "lora_path": ("x",)}, "lora_backend='fused'"),
        (
            {"lora_backend": "distill", "lora_path": ("x",), "quantization": "int8"},
            "--lora-backend and --quantization exclude each other",
        ),
        (
            {
                "lora_backend": "distill",
                "lora_path": ("x",),
                "enable_distributed_layerwise_offload": True,
                "dlo_use_allgather": False,
                "dlo_enable_runtime_cache": True,
            },
            "--lora-backend and --dlo-enable-runtime-cache exclude each other",
        ),
    ],
    ids=str,
)
def test_what_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="x", **knobs)


def test_files_that_do_not_fit(checkpoint: Path, tiny_lora: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"--lora-path: lora 'nowhere\.safetensors': No such file"):
        load(checkpoint, "nowhere.safetensors", lora_backend="distill")
    with pytest.raises(ConfigError, match=r"--lora-path: lora .*: 0 of .* keys matched"):
        load(checkpoint, str(tiny_lora("sd15")), lora_backend="distill")
    with pytest.raises(ConfigError, match="one denoiser: FILE alone"):
        load(checkpoint, f"transformer={tiny_lora(NAME)}", lora_backend="distill")

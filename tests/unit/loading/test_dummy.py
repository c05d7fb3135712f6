"""Random weights from the configs alone: what is built has the dtypes and buffers that loading would give."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import ModelConfig
from polymux.errors import CheckpointError
from polymux.loading import load_pipeline
from polymux.testing.tiny import TINY, Ctx
from polymux.testing.tiny.driver import call_pipeline

CPU = torch.device("cpu")
Checkpoint = Callable[..., Path]


@pytest.fixture
def without_weights(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Callable[[str], Path]:
    ignore = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return lambda name: Path(shutil.copytree(tiny_checkpoint(name), tmp_path / name, ignore=ignore))


def dummy(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_pipeline(ModelConfig(model=str(folder), load_format="dummy"), CPU, dtype)


def modules(pipe: Any) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen-image", "flux-dev", "wan21-t2v", "kandinsky5-t2i", "stable-audio"])
def test_built_as_loaded(
    tiny_checkpoint: Checkpoint, without_weights: Callable[[str], Path], name: str, dtype: torch.dtype
) -> None:
    made = modules(dummy(without_weights(name), dtype))
    loaded = modules(load_pipeline(ModelConfig(model=str(tiny_checkpoint(name))), CPU, dtype))
    assert made.keys() == loaded.keys()
    for part, module in loaded.items():
        saved = module.state_dict().keys()
        wanted, got = tensors_of(module), tensors_of(made[part])
        assert wanted.keys() == got.keys()
        for key, value in wanted.items():
            assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), f"{part}.{key}"
            assert got[key].isfinite().all()
            if key not in saved:  # made by the model itself, such as rotary frequencies
                assert torch.equal(got[key], value), f"{part}.{key}"


@pytest.mark.parametrize("name", ["qwen-image", "sdxl", "flux-modular"])
def test_runs_and_is_the_same_every_time(without_weights: Callable[[str], Path], name: str) -> None:
    folder = without_weights(name)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = dummy(folder)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers change
    torch.manual_seed(2)
    second = dummy(folder)
    for part, module in modules(first).items():
        for key, value in module.state_dict().items():
            assert torch.equal(modules(second)[part].state_dict()[key], value)
    if TINY[name].kind == "diffusers":
        output = call_pipeline(first, Ctx(), TINY[name].call)
        assert all(value.isfinite().all() and value.std() > 0 for value in output.values())


def test_tied_weights_are_tied(without_weights: Callable[[str], Path]) -> None:
    encoder = dummy(without_weights("flux-dev")).text_encoder_2
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


def test_weights_are_noise_around_zero_and_gains_around_one(without_weights: Callable[[str], Path]) -> None:
    transformer = dummy(without_weights("qwen-image")).transformer
    for name, value in transformer.named_parameters():
        assert value.std() == pytest.approx(0.02, rel=0.7), name
        is_gain = value.dim() == 1 and name.endswith("weight")
        assert value.mean() == pytest.approx(float(is_gain), abs=0.02), name
    assert not any(p.requires_grad for p in transformer.parameters())


def test_a_missing_config(without_weights: Callable[[str], Path]) -> None:
    folder = without_weights("flux-dev")
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"transformer/config.json: cannot be read"):
        dummy(folder)


def test_a_config_that_makes_no_model(without_weights: Callable[[str], Path]) -> None:
    folder = without_weights("flux-dev")
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": ', '"num_layers": "x", "other": '))
    with pytest.raises(CheckpointError, match=r"transformer/config.json: transformer \(FluxTransformer2DModel\)"):
        dummy(folder)

"""Loading onto a GPU: the same tensors as on the CPU, all on the device, and random weights made there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymux.config import ModelConfig
from polymux.errors import CheckpointError
from polymux.loading import auto_dtype, load_pipeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda", 0)
Checkpoint = Callable[..., Path]


def tensors(pipe: Any) -> dict[str, torch.Tensor]:
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in [*module.named_parameters(), *module.named_buffers()]
    }


def load(folder: Path, device: torch.device, dtype: torch.dtype, **settings: Any) -> Any:
    return load_pipeline(ModelConfig(model=str(folder), **settings), device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["flux-dev", "qwen-image", "kandinsky5-t2i", "flux-modular"])
def test_loaded_as_on_the_cpu(tiny_checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
    folder = tiny_checkpoint(name)
    expected, found = tensors(load(folder, torch.device("cpu"), dtype)), tensors(load(folder, GPU, dtype))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert found[key].device == GPU and found[key].dtype == value.dtype, key
        assert torch.allclose(found[key].cpu(), value, rtol=1e-6, equal_nan=True), key


@pytest.mark.parametrize("name", ["flux-dev", "qwen-image", "kandinsky5-t2i", "stable-audio"])
def test_random_weights(tiny_checkpoint: Checkpoint, name: str) -> None:
    folder = tiny_checkpoint(name)
    expected = tensors(load(folder, GPU, torch.bfloat16))
    found = tensors(load(folder, GPU, torch.bfloat16, load_format="dummy"))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert (found[key].device, found[key].dtype, found[key].shape) == (GPU, value.dtype, value.shape), key
        assert found[key].isfinite().all(), key


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
def test_a_missing_tensor_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path, part: str) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("flux-dev"), tmp_path / "flux"))
    [file] = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = next(key for key in weights if key.endswith("weight") and "norm" not in key)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}' is missing"):
        load(folder, GPU, torch.bfloat16)


def test_auto_dtype() -> None:
    assert auto_dtype("auto", GPU) in (torch.bfloat16, torch.float16)
    assert auto_dtype("fp32", GPU) == torch.float32

"""Files as others make them: GGUF, and checkpoints that are quantized already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polymux.config import ModelConfig
from polymux.loading import resolve


@pytest.fixture(scope="session")
def demo() -> Path:
    return resolve(ModelConfig(model="demo"))


@pytest.fixture(scope="session")
def demo_gguf(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`demo_gguf("Q8_0")`: the embedded model's transformer, the matrices of its blocks in this type."""
    state = load_file(demo / "transformer" / "diffusion_pytorch_model.safetensors")
    folder = tmp_path_factory.mktemp("gguf")

    def get(kind: str) -> Path:
        file = folder / f"{kind}.gguf"
        if not file.exists():
            write_gguf(file, state, kind)
        return file

    return get


def write_gguf(file: Path, state: dict[str, torch.Tensor], kind: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    number = GGMLQuantizationType[kind]
    writer = GGUFWriter(str(file), "test")
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if array.ndim == 2 and array.shape[1] % 32 == 0 and "blocks" in name:
            writer.add_tensor(name, quants.quantize(array, number), raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""A component that is read in parts: what is missing is said as when it is read whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from polymux.errors import CheckpointError, ConfigError
from polymux.loading.component import Part
from polymux.loading.options import LoadFlags
from polymux.loading.sliced import Ranks, load_sliced

NAME = "diffusion_pytorch_model.safetensors"
LAYER = "transformer_blocks.0.attn.to_q.weight"


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("flux-dev") / "transformer", tmp_path / "transformer"))


def load(folder: Path, rank: int = 0, size: int = 2, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    part = Part("transformer", FluxTransformer2DModel, folder)
    return load_sliced(part, part.weights(LoadFlags()), torch.device("cpu"), dtype, Ranks(rank, size))[0]


def test_each_rank_reads_its_part(folder: Path) -> None:
    whole = load_file(folder / NAME)
    parts = [load(folder, rank, dtype=torch.bfloat16).state_dict() for rank in (0, 1)]
    assert torch.equal(torch.cat([part[LAYER] for part in parts]), whole[LAYER].bfloat16())
    bias = "transformer_blocks.0.attn.to_out.0.bias"
    assert torch.equal(parts[0][bias], whole[bias].bfloat16())
    assert not parts[1][bias].any()
    assert torch.equal(parts[1]["proj_out.weight"], whole["proj_out.weight"].bfloat16())


def test_missing(folder: Path) -> None:
    tensors = load_file(folder / NAME)
    del tensors[LAYER]
    save_file(tensors, folder / NAME)
    with pytest.raises(CheckpointError, match=f"{LAYER}.* is missing"):
        load(folder)


def test_of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / NAME)
    tensors[LAYER] = tensors[LAYER][:, 1:].clone()
    save_file(tensors, folder / NAME)
    with pytest.raises(CheckpointError, match=f"{LAYER}.* has shape"):
        load(folder)


def test_heads_that_do_not_divide(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads = 2, which 3 ranks cannot divide"):
        load(folder, size=3)


def test_quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(ConfigError, match="only unquantized safetensors"):
        load(folder)

"""On a CPU, weights of the file's own dtype stay mapped: processes share them, and loading copies nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
import transformers

from polymux.config import ModelConfig
from polymux.loading import load_pipeline

SMAPS = Path("/proc/self/smaps_rollup")
Checkpoint = Callable[..., Path]


def private_bytes() -> int:
    """Memory that belongs to this process alone, mapped files not counted."""
    match = re.search(r"^Anonymous:\s+(\d+) kB", SMAPS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.skipif(not SMAPS.exists(), reason="the kernel does not say")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_weights_stay_mapped_at_fp32(tiny_checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("flux-dev"), tmp_path / "flux"))
    _enlarge(folder / "transformer", "diffusion_pytorch_model.safetensors")
    config = transformers.T5Config.from_pretrained(str(folder / "text_encoder_2"), d_ff=65536)
    transformers.T5EncoderModel(config).save_pretrained(str(folder / "text_encoder_2"))
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert size > 50e6
    settings = ModelConfig(model=str(folder))
    load_pipeline(ModelConfig(model=str(tiny_checkpoint("flux-dev"))), torch.device("cpu"), dtype)  # imports and caches

    before = private_bytes()
    pipe = load_pipeline(settings, torch.device("cpu"), dtype)
    total = sum(float(p.sum()) for p in pipe.transformer.parameters()) + float(pipe.text_encoder_2.shared.weight.sum())
    grown = private_bytes() - before
    assert total == total
    share = share_mapped(pipe)
    if dtype == torch.float32:
        assert grown < size / 8 and share > 0.9
    else:
        assert share == 0  # the other dtype needs memory of its own: the measure can tell


def share_mapped(pipe: diffusers.DiffusionPipeline) -> float:
    """Of the bytes of all weights, those that lie in a file of weights that is mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(x, 16) for x in line[0].split("-")] for line in lines if line[-1].endswith(".safetensors")]
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    weights = [p for module in modules for p in module.parameters()]
    there = [p.nbytes for p in weights if any(begin <= p.data_ptr() < end for begin, end in spans)]
    return sum(there) / sum(p.nbytes for p in weights)


def _enlarge(folder: Path, file: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"joint_attention_dim": 32, "num_attention_heads": 16}
    diffusers.FluxTransformer2DModel.from_config(config).save_pretrained(str(folder))
    assert (folder / file).is_file()

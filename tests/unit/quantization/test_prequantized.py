"""Checkpoints that are quantized already run as what they are, by their own config, or say what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_engines import OFFLOAD, ROUNDING, apart, engine, picture, transformer, unquantized
from safetensors.torch import load_file, save_file

from polymux.errors import CheckpointError, ConfigError
from polymux.quantization.layer import PackedLinear
from polymux.quantization.prequantized import check_movable

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # and what they stand for
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")


def bitsandbytes(name: str, weight: torch.Tensor) -> Packed:
    """As the package's layers save themselves, scales packed too."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    saved = {name: codes, **{f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}}
    laid_out = quantize_4bit(weight.reshape(-1), quant_type="nf4", compress_statistics=True)  # see `bnb.BnB4.unpack`
    return saved, dequantize_4bit(*laid_out).view(weight.shape)


def modelopt(name: str, weight: torch.Tensor) -> Packed:
    scale, layer = weight.abs().max() / 448, name.removesuffix(".weight")
    codes = (weight / scale).to(torch.float8_e4m3fn)
    saved = {name: codes, f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(0.01)}
    return saved, codes.float() * scale


def mxfp8(name: str, weight: torch.Tensor) -> Packed:
    groups = weight.view(weight.shape[0], -1, 32)
    exponents = (groups.abs().amax(-1) / 448).log2().ceil().clamp(-127, 127)
    codes = (groups / 2.0 ** exponents.unsqueeze(-1)).to(torch.float8_e4m3fn)
    scale = (exponents + 127).to(torch.uint8)
    saved = {name: codes.view(weight.shape), f"{name}_scale": scale}
    return saved, (codes.float() * 2.0 ** exponents.unsqueeze(-1)).view(weight.shape)


KINDS: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], Packed], str]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bitsandbytes, "nf4",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt, "fp8"),
    "mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8, "mxfp8"),
}  # fmt: skip


def checkpoint(demo: Path, at: Path, kind: str) -> tuple[Path, Tensors]:
    """The embedded model, its transformer's blocks quantized by somebody else, and what their weights are now."""
    own, pack, _ = KINDS[kind]
    folder = Path(shutil.copytree(demo, at / kind))
    saved: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if "blocks" in name and tensor.ndim == 2:
            tensors, meant[name] = pack(name, tensor.float())
            saved |= tensors
        else:
            saved[name] = tensor
    save_file(saved, folder / WEIGHTS)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    return folder, meant


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_as_what_it_is(demo: Path, tmp_path: Path, kind: str, swap_all: None) -> None:
    folder, meant = checkpoint(demo, tmp_path, kind)
    made = []
    for flags in OFFLOAD.values():
        at = engine(folder, **flags)
        assert at.described.quantized == {"transformer": f"{KINDS[kind][2]}, weights only"}
        made.append(picture(at))
        at.close()
    assert all(apart(one, made[0]) <= ROUNDING for one in made)
    at = engine(folder)
    packed = {path: layer for path, layer in transformer(at).named_modules() if isinstance(layer, PackedLinear)}
    assert {f"{path}.weight" for path in packed} == meant.keys()
    for path, layer in packed.items():
        assert (layer.weight - meant[f"{path}.weight"]).abs().max() <= 1e-6
    unquantized(at)
    assert apart(made[0], picture(at)) <= ROUNDING


def test_a_model_of_transformers_that_its_library_has_loaded(demo: Path, tmp_path: Path) -> None:
    """In bf16, as it was saved; it computes in fp32, as the engine does."""
    from transformers import BitsAndBytesConfig, Qwen2_5_VLForConditionalGeneration

    folder = Path(shutil.copytree(demo, tmp_path / "encoder"))
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        demo / "text_encoder", quantization_config=how, device_map={"": "cpu"}
    )
    (folder / "text_encoder" / "model.safetensors").unlink()
    model.save_pretrained(folder / "text_encoder")
    assert model.dtype == torch.bfloat16
    at, offloaded = engine(folder), engine(folder, enable_cpu_offload=True)
    assert at.described.quantized == {"text_encoder": "nf4, weights only"}
    assert apart(picture(at), picture(offloaded)) <= ROUNDING
    assert apart(picture(at), picture(engine())) > 1e-4


def test_a_tensor_that_is_missing_is_named(demo: Path, tmp_path: Path) -> None:
    folder, _ = checkpoint(demo, tmp_path, "modelopt")
    state = load_file(folder / WEIGHTS)
    kept = {name: value for name, value in state.items() if name != "transformer_blocks.0.attn.to_q.weight"}
    save_file(kept, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"transformer_blocks\.0\.attn\.to_q\.weight' is missing"):
        engine(folder)
    save_file(state | {"proj_out.bias": torch.zeros(3)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"'proj_out.bias' has shape \[3\]"):
        engine(folder)


def test_it_is_not_quantized_twice(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantized already, by modelopt: leave the choice out"):
        engine(checkpoint(demo, tmp_path, "modelopt")[0], quantization="fp8")


def test_other_kinds_name_their_package(demo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo, tmp_path / "other"))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    for own in ({"quant_method": "quanto"}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}):
        (folder / "transformer" / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
        with pytest.raises(ConfigError, match=r"needs the package .*: pip install"):
            engine(folder)


def test_tensors_of_a_library_s_own_kind_are_not_moved() -> None:
    from bitsandbytes.nn import Linear4bit

    with pytest.raises(ConfigError) as caught:
        check_movable("text_encoder", torch.nn.Sequential(Linear4bit(64, 64)), "enable_cpu_offload")
    assert "--enable-cpu-offload and the quantization that the checkpoint has text_encoder in" in caught.value.message

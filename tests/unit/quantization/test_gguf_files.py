"""A denoiser's weights out of a GGUF file: what the file holds is what runs, or an error says why not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_engines import ROUNDING, apart, engine, picture, transformer, unquantized, write_gguf
from safetensors.torch import load_file

from polymux.config import EngineConfig
from polymux.errors import CheckpointError, ConfigError, PolymuxError
from polymux.quantization.layer import PackedLinear

Gguf = Callable[[str], Path]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_the_picture_is_that_of_the_file_unpacked(demo_gguf: Gguf, demo: Path, kind: str) -> None:
    from gguf import GGUFReader, quants

    at = engine(gguf_file=(str(demo_gguf(kind)),))
    got = picture(at)
    assert at.described.quantized == {"transformer": f"gguf {kind}, weights only"}
    held = {t.name: quants.dequantize(t.data, t.tensor_type) for t in GGUFReader(str(demo_gguf(kind))).tensors}
    packed = {path: layer for path, layer in transformer(at).named_modules() if isinstance(layer, PackedLinear)}
    assert len(packed) == 84
    size = (demo / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size
    for path, layer in packed.items():
        assert apart(layer.weight.numpy(), held[f"{path}.weight"]) <= 1e-6
    assert sum(p.nbytes for p in transformer(at).parameters()) < 0.6 * size
    unquantized(at)
    assert apart(got, picture(at)) <= ROUNDING


def test_offload_adapters_and_sleep(
    tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path], tmp_path: Path, swap_all: None
) -> None:
    folder, lora = tiny_checkpoint("qwen-image"), tiny_lora("qwen-image")
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    write_gguf(tmp_path / "q.gguf", state, "Q8_0")
    pictures = []
    for flags in ({}, {"enable_cpu_offload": True}, {"enable_layerwise_offload": True}):
        at = engine(folder, gguf_file=(f"transformer={tmp_path / 'q.gguf'}",), **flags)
        with_it = picture(at, lora=lora)  # while nothing of the denoiser is on the device yet
        pictures.append([picture(at), with_it, picture(at)])
        at.sleep(1)
        at.wake_up()
        assert apart(picture(at, lora=lora), pictures[-1][1]) == 0
        at.close()
    for made in pictures:
        assert apart(made[0], made[2]) == 0
        assert all(apart(one, other) <= ROUNDING for one, other in zip(made, pictures[0], strict=True))


def test_the_checkpoint_s_own_weights_need_not_be_there(demo_gguf: Gguf, demo: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(demo, tmp_path / "demo"))
    (copied / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    file = str(demo_gguf("Q8_0"))
    assert apart(picture(engine(copied, gguf_file=(file,))), picture(engine(gguf_file=(file,)))) <= ROUNDING


def test_several_denoisers_need_a_file_each(tiny_checkpoint: Callable[..., Path], demo_gguf: Gguf) -> None:
    with pytest.raises(ConfigError, match="--gguf-file transformer=FILE transformer_2=FILE"):
        engine(tiny_checkpoint("wan22-t2v-moe"), gguf_file=(str(demo_gguf("Q8_0")),))


def test_half_precision(demo_gguf: Gguf) -> None:
    at = engine(gguf_file=(str(demo_gguf("Q8_0")),), dtype="bf16")
    kinds = {p.dtype for p in transformer(at).parameters()}
    assert kinds == {torch.bfloat16, torch.uint8} and at.described.dtype == "bfloat16"


def refusal(file: Path, **settings: Any) -> PolymuxError:
    with pytest.raises(PolymuxError) as caught:
        engine(gguf_file=(str(file),), **settings)
    return caught.value


def test_what_is_wrong_with_a_file_is_told(demo: Path, demo_gguf: Gguf, tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf").message
    (tmp_path / "text.gguf").write_text("GGML, not what it says")
    assert "not a GGUF file of version 2 or 3" in refusal(tmp_path / "text.gguf").message
    whole = demo_gguf("Q8_0").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    error = refusal(tmp_path / "cut.gguf")
    assert isinstance(error, CheckpointError) and "cut.gguf" in error.message
    state = load_file(demo / "transformer" / "diffusion_pytorch_model.safetensors")
    del state["transformer_blocks.1.attn.to_q.weight"]
    write_gguf(tmp_path / "part.gguf", state, "Q8_0")
    assert "'transformer_blocks.1.attn.to_q.weight' is missing" in refusal(tmp_path / "part.gguf").message


def test_what_diffusers_cannot_read_is_refused(demo_gguf: Gguf) -> None:
    spec = {"text_encoder": {"method": "gguf", "file": str(demo_gguf("Q8_0"))}}
    with pytest.raises(ConfigError, match="diffusers reads no such files for text_encoder"):
        engine(diffusion_quantization_config=spec)


def test_random_weights_are_no_place_for_a_file(demo_gguf: Gguf) -> None:
    with pytest.raises(ConfigError, match="--gguf-file and --load-format dummy exclude each other"):
        EngineConfig.from_flat(model="demo", load_format="dummy", gguf_file=(str(demo_gguf("Q8_0")),))

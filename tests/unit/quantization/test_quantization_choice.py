"""What may be asked for, and what every impossible choice is answered with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.component import is_denoiser
from polymux.errors import ConfigError
from polymux.quantization import bnb, gguf, requirements
from polymux.quantization.prequantized import check_quantized
from polymux.quantization.quantizer import Quantizer
from polymux.quantization.requirements import check_spec, lack_for_dynamic
from polymux.quantization_config import DENOISERS, METHODS, QuantizationSpec, parse_choice

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**values: Any) -> EngineConfig:
    return EngineConfig.from_flat(model="demo", **values)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert caught.value.param is not None
    return caught.value.message


def test_nothing_is_asked_for_by_default() -> None:
    assert config().quantization.choice == {}


@pytest.mark.parametrize("method", [m for m in METHODS if m != "gguf"])
def test_a_method_is_for_the_denoisers(method: Any) -> None:
    expected = {DENOISERS: QuantizationSpec(method=method)}
    assert config(quantization=method).quantization.choice == expected
    assert config(diffusion_quantization_config={"method": method}).quantization.choice == expected


def test_components_have_choices_of_their_own() -> None:
    given = {"transformer": {"method": "fp8", "ignored_layers": ["*.ff"]}, "text_encoder": "nf4"}
    assert parse_choice(given) == {
        "transformer": QuantizationSpec(method="fp8", ignored_layers=("*.ff",)),
        "text_encoder": QuantizationSpec(method="nf4"),
    }


def test_gguf_files() -> None:
    spec = QuantizationSpec(method="gguf", file="a=b/q.gguf")
    assert config(gguf_file=("transformer=a=b/q.gguf".replace("a=b", "ab"),)).quantization.choice == {
        "transformer": QuantizationSpec(method="gguf", file="ab/q.gguf")
    }
    assert config(gguf_file=("q.gguf",), quantization="gguf").quantization.choice == {
        DENOISERS: QuantizationSpec(method="gguf", file="q.gguf")
    }
    assert parse_choice({"transformer": {"method": "gguf", "file": "a=b/q.gguf"}}) == {"transformer": spec}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transformer": "fp7"}, ("transformer", "fp7", "fp8, int8")),
        ({"method": "fp8", "scale": 1}, ("scale", "ignored_layers")),
        ({"method": "fp8", "activation_scheme": "static"}, ("static",)),
        ({"transformer": 8}, ("transformer", "int")),
        ({"method": "nf4", "activation_scheme": "dynamic"}, ("nf4", "inputs are never quantized")),
        ({"method": "gguf"}, ("file", "gguf")),
        ({"method": "int8", "file": "q.gguf"}, ("file", "no other method")),
        ({"method": "gguf", "file": "q.gguf", "ignored_layers": ["a"]}, ("ignored_layers", "says itself")),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(given: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(diffusion_quantization_config=given)
    assert all(word in message for word in ("diffusion_quantization_config", *words)), message


def test_flags_that_exclude_each_other() -> None:
    both = refusal(quantization="fp8", diffusion_quantization_config={"method": "fp8"})
    assert "--quantization and --diffusion-quantization-config exclude each other" in both
    both = refusal(quantization="fp8", gguf_file=("q.gguf",))
    assert "--gguf-file and --quantization fp8 exclude each other" in both
    assert "--quantization gguf needs --gguf-file" in refusal(quantization="gguf")
    assert "one file for each component" in refusal(gguf_file=("a.gguf", "b.gguf"))
    assert "one file for each component" in refusal(gguf_file=("transformer=a.gguf", "transformer=b.gguf"))
    cache = {"enable_distributed_layerwise_offload": True, "dlo_enable_runtime_cache": True}
    both = refusal(gguf_file=("q.gguf",), **cache)
    assert "--gguf-file and --dlo-enable-runtime-cache exclude each other" in both


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb, "is_installed", lambda: False)
    monkeypatch.setattr(gguf, "is_installed", lambda: False)
    for spec, package in (
        (QuantizationSpec(method="nf4"), "bitsandbytes"),
        (QuantizationSpec(method="gguf", file="q.gguf"), "gguf"),
    ):
        with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install 'polymux\[quantization\]'"):
            check_spec(spec, CPU)
    check_spec(QuantizationSpec(method="int4"), CPU)


def test_a_gpu_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.torch.cuda, "get_device_capability", lambda device: (8, 6))
    dynamic = QuantizationSpec(method="fp8", activation_scheme="dynamic")
    with pytest.raises(ConfigError, match=r"GPU of compute capability 8\.9, and this one has 8\.6; 'weight_only' runs"):
        check_spec(dynamic, CUDA)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9, and the device is cpu"):
        check_spec(dynamic, CPU)
    check_spec(QuantizationSpec(method="int8", activation_scheme="dynamic"), CUDA)
    monkeypatch.setattr(requirements.torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert lack_for_dynamic("fp8", CUDA) is None


@pytest.mark.parametrize(
    ("own", "package"),
    [
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "quanto"}, "optimum-quanto"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvidia-modelopt"),
    ],
)
def test_what_a_checkpoint_needs_is_named(own: dict[str, str], package: str) -> None:
    with pytest.raises(ConfigError, match=f"as the checkpoint has transformer, needs the package {package}"):
        check_quantized("transformer", own, True, CPU)


def test_a_checkpoint_in_int8_of_bitsandbytes_needs_a_gpu() -> None:
    own = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(ConfigError, match="need a GPU, and the device is cpu"):
        check_quantized("transformer", own, True, CPU)


@pytest.mark.parametrize(
    ("knobs", "param"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"diffusion_quantization_config": {"method": "int8"}}, "diffusion_quantization_config"),
        ({"gguf_file": ("q.gguf",)}, "gguf_file"),
    ],
)
def test_refusals_name_the_knob_that_chose(knobs: dict[str, Any], param: str) -> None:
    chosen = config(**knobs).quantization
    quantizer = Quantizer(chosen.choice, CPU, is_denoiser, chosen.asked_by)
    with pytest.raises(ConfigError, match=f"--{param.replace('_', '-')}: there is no denoiser") as caught:
        quantizer.check_names(["text_encoder"], ())
    assert caught.value.param == param
    with pytest.raises(ConfigError) as caught:
        quantizer.check_applied({"transformer": torch.nn.Linear(2, 2)})
    assert caught.value.param == param

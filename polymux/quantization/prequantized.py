"""Components that a checkpoint holds quantized already: by what, whether it can run here, and what its tensors mean.

The method is what the component's own config says (`quantization_config`). Some methods' files are read here, so that
such a component is a plain one; what others need is checked before any file is read, since the libraries say it late.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from polymux.errors import CheckpointError, ConfigError
from polymux.quantization.bnb import BnB4, parts_of
from polymux.quantization.formats import FP8, MXFP8
from polymux.quantization.layer import Format, Parts, as_bytes
from polymux.quantization.requirements import lack_for_dynamic, missing_package

PACKAGES = {  # by method: what reads such weights, and the module that it is imported by
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "torchao": ("torchao", "torchao"),
    "quanto": ("optimum-quanto", "optimum.quanto"),
    "modelopt": ("nvidia-modelopt", "modelopt"),
    "gguf": ("gguf", "gguf"),
}
WEIGHT = ""  # the name of the weight among a layer's tensors; others are named by what comes behind "weight"

# Tensors of a layer, by what comes behind "weight" in their names, to what the layer keeps. None: it is not quantized.
ReadLayer = Callable[[Mapping[str, torch.Tensor]], tuple[Format, Parts] | None]


def method_of(config: Any) -> str:
    """The method that a component's config names. Raises CheckpointError if it names none."""
    if not isinstance(config, dict):
        raise CheckpointError(f"quantization_config: {config!r} is not a JSON object")
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    method = config.get("quant_method")
    if not isinstance(method, str):
        raise CheckpointError("quantization_config names no quant_method")
    return method


def layer_reader(config: Any, device: torch.device) -> ReadLayer | None:
    """What reads the layers of a model of diffusers; None: its library does."""
    if method_of(config) == "bitsandbytes" and config.get("load_in_4bit"):
        return _bitsandbytes
    algorithm = str(config.get("quant_algo", "")).upper() if method_of(config) == "modelopt" else ""
    if algorithm == "FP8":
        return _FP8Layers(dynamic=lack_for_dynamic("fp8", device) is None)
    return _mxfp8 if algorithm == "MXFP8" else None


def check_quantized(name: str, config: Any, of_diffusers: bool, device: torch.device) -> None:
    """Raises ConfigError that names the package or the device that is missing."""
    method = method_of(config)
    if method != "bitsandbytes" and of_diffusers and layer_reader(config, device) is not None:
        return
    if method in PACKAGES and not _is_installed(PACKAGES[method][1]):
        raise missing_package(f"by {method}, as the checkpoint has {name},", PACKAGES[method][0], "model")
    if method == "bitsandbytes" and config.get("load_in_8bit") and of_diffusers and device.type != "cuda":
        why = f"its int8 layers need a GPU, and the device is {device.type}"
        raise ConfigError(f"quantization by bitsandbytes, as the checkpoint has {name}: {why}", param="device")


def check_movable(name: str, module: torch.nn.Module, strategy: str) -> None:
    """Raise ConfigError if a component has tensors of its library's own kind. `strategy`: what would move them."""
    for path, parameter in module.named_parameters():
        if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
            kind = type(parameter).__name__
            raise ConfigError(
                f"--{strategy.replace('_', '-')} and the quantization that the checkpoint has {name} in exclude each "
                f"other: {path} is a {kind} of its library, and only plain tensors can be moved",
                param=strategy,
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in is missing
        return False


def _bitsandbytes(tensors: Mapping[str, torch.Tensor]) -> tuple[Format, Parts] | None:
    if not any(".quant_state." in name for name in tensors):
        return None
    from bitsandbytes.functional import QuantState  # optional, and slow to import

    state: Any = QuantState.from_dict({n.lstrip("."): t for n, t in tensors.items() if n}, torch.device("cpu"))
    return BnB4(state.quant_type, state.blocksize), parts_of(tensors[WEIGHT], state)


class _FP8Layers:
    """Of ModelOpt: one scale for the whole weight, or one for each row. That for the inputs is not used: here each
    token has its own, which is finer."""

    def __init__(self, dynamic: bool) -> None:
        self._format = FP8(dynamic=dynamic)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Format, Parts] | None:
        weight, scale = tensors[WEIGHT], tensors.get("_scale")
        if weight.dtype != torch.float8_e4m3fn or scale is None or scale.numel() not in (1, weight.shape[0]):
            return None
        rows = scale.float().reshape(-1, 1).expand(weight.shape[0], 1)
        return self._format, {"codes": as_bytes(weight), "scale": as_bytes(rows)}


def _mxfp8(tensors: Mapping[str, torch.Tensor]) -> tuple[Format, Parts] | None:
    weight, scale = tensors[WEIGHT], tensors.get("_scale")
    if weight.dtype != torch.float8_e4m3fn or scale is None or scale.numel() * 32 != weight.numel():
        return None
    return MXFP8(), {"codes": as_bytes(weight), "scale": as_bytes(scale.reshape(weight.shape[0], -1))}

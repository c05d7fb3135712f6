"""Components that a checkpoint holds quantized already: by what, and whether it can run here.

The method is what the component's own config says (`quantization_config`). What its library needs is checked before any
file is read; the libraries would say it late, or not at all.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from polymux.errors import CheckpointError
from polymux.quantization.requirements import missing_package

PACKAGES = {  # by method: what reads such weights
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "quanto": "optimum-quanto",
    "modelopt": "nvidia-modelopt",
    "gguf": "gguf",
}
MODULES = {"optimum-quanto": "optimum.quanto", "nvidia-modelopt": "modelopt"}


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


def check_quantized(name: str, config: Any, device: torch.device) -> None:
    """Raises ConfigError that names the package or the device that is missing."""
    method = method_of(config)
    package = PACKAGES.get(method)
    if package is not None and not _is_installed(MODULES.get(package, package)):
        raise missing_package(f"by {method}, as the checkpoint has {name},", package)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in is missing
        return False

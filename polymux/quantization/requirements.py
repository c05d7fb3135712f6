"""Whether a choice can be met here, and what is missing where it cannot."""

from __future__ import annotations

import torch

from polymux.errors import ConfigError
from polymux.quantization import bnb, gguf
from polymux.quantization_config import QuantizationSpec

EXTRA = "pip install 'polymux[quantization]'"
CAPABILITIES = {"fp8": (8, 9), "int8": (8, 0)}  # of GPUs that multiply matrices of such numbers


def check_spec(spec: QuantizationSpec, device: torch.device, asked_by: str = "quantization") -> None:
    """Raises ConfigError that names the package or the device. `asked_by`: the knob that it comes from."""
    if spec.method in ("nf4", "fp4") and not bnb.is_installed():
        raise missing_package(spec.method, "bitsandbytes", asked_by)
    if spec.method == "gguf" and not gguf.is_installed():
        raise missing_package(spec.method, "gguf", asked_by)
    if spec.activation_scheme == "dynamic" and (lack := lack_for_dynamic(spec.method, device)) is not None:
        raise ConfigError(
            f"activation_scheme 'dynamic' cannot be met: {lack}; 'weight_only' runs anywhere",
            param="diffusion_quantization_config",
        )


def missing_package(method: str, package: str, asked_by: str = "quantization") -> ConfigError:
    return ConfigError(f"quantization {method} needs the package {package}: {EXTRA}", param=asked_by)


def lack_for_dynamic(method: str, device: torch.device) -> str | None:
    """Why inputs cannot be quantized on this device; None: they can."""
    major, minor = CAPABILITIES[method]
    needed = f"{method} products need a GPU of compute capability {major}.{minor}"
    if device.type == "cpu" and method == "int8":
        return None  # slowly, and the same
    if device.type != "cuda":
        return f"{needed}, and the device is {device.type}"
    there = torch.cuda.get_device_capability(device)
    return None if there >= (major, minor) else f"{needed}, and this one has {there[0]}.{there[1]}"

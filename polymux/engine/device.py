"""Which device a stage runs on."""

from __future__ import annotations

import torch

from polymux.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """auto: the first CUDA device, or else the CPU. Raises ConfigError if the device is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: allowed are auto, cpu, cuda and cuda:N", param="device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: allowed are auto, cpu, cuda and cuda:N", param="device")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise ConfigError(f"device={name!r}: there are {count} CUDA devices", param="device")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device

"""Which device a stage runs on."""

from __future__ import annotations

import re

import torch

from polymux.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """auto: the first CUDA device, or else the CPU; auto:N: the N-th, or else the CPU. Raises ConfigError if the device
    is not there."""
    if re.fullmatch(r"auto(:\d+)?", name):
        name = name.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)  # torch takes the index of a device modulo 256
    if match is None:
        raise ConfigError(f"device={name!r}: allowed are auto, auto:N, cpu, cuda and cuda:N", param="device")
    if name == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device={name!r}: there are {count} CUDA devices", param="device")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

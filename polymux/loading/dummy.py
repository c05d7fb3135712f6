"""Models with random weights, built on the device from their configs alone: for benchmarks at real size.

The values mean nothing, but they are finite, the same on every rank and in every run, and of the dtype that loading
would give. What a model computes when it is built (rotary frequencies, position ids) is right, because it is built
the way loading builds it; only the tensors that a checkpoint would have to supply are made up.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch

from polymux.loading.component import Part, place
from polymux.loading.empty import empty_diffusers_model
from polymux.loading.index import read_json
from polymux.loading.libraries import is_diffusers_model, is_transformers_model, reading

SEED = 0
STD = 0.02


def dummy_model(
    part: Part, device: torch.device, dtype: torch.dtype, making: torch.device | None = None
) -> torch.nn.Module:
    """A component with weights, without its weights, on `device`. Raises CheckpointError if its config is missing or no
    good. `making`: where the numbers are drawn, if not there: a GPU takes a second for what takes a host minutes."""
    making = making or device
    config_file = part.folder / "config.json"
    config = read_json(config_file)
    devices = [making] if making.type == "cuda" else []
    with reading(f"{config_file}: {part.name} ({part.cls.__name__})"), torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        if is_diffusers_model(part.cls):
            model = _diffusers_model(part.cls, config, device, dtype, making)
        elif is_transformers_model(part.cls):
            model = _transformers_model(part, making, dtype)
        else:
            raise TypeError(f"{part.cls.__name__} is a model of neither diffusers nor transformers")
    return place(part.name, model, device)


def _diffusers_model(
    cls: type[Any], config: dict[str, object], device: torch.device, dtype: torch.dtype, making: torch.device
) -> torch.nn.Module:
    model = empty_diffusers_model(cls, config, dtype)
    kept = cls._keep_in_fp32_modules or ()
    _fill(model, device, dtype, [kept] if isinstance(kept, str) else kept, making)
    return model


def _fill(
    model: torch.nn.Module, device: torch.device, dtype: torch.dtype, in_fp32: Collection[str], making: torch.device
) -> None:
    """Give every parameter a value, and every saved tensor the dtype it would be loaded with."""
    generator = torch.Generator(making).manual_seed(SEED)
    saved = model.state_dict().keys()
    made: dict[int, torch.nn.Parameter] = {}  # a parameter that two modules share stays shared
    for prefix, module in model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            path = [*prefix.split("."), name]
            target = torch.float32 if any(part in in_fp32 for part in path) else dtype
            target = target if tensor.is_floating_point() else tensor.dtype
            if isinstance(tensor, torch.nn.Parameter):
                if id(tensor) not in made:
                    value = _random(name, tensor.shape, target, making, generator).to(device)
                    made[id(tensor)] = torch.nn.Parameter(value, requires_grad=False)
                setattr(module, name, made[id(tensor)])
            elif ".".join(filter(None, path)) in saved:
                setattr(module, name, tensor.to(target))


def _random(
    name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Small normal noise; around one for gains, since with gains near zero a deep model puts out nothing."""
    value = torch.empty(shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return value.zero_()
    value.normal_(0.0, STD, generator=generator)
    is_gain = len(shape) <= 1 and not name.endswith("bias")
    return value.add_(1.0) if is_gain else value


def _transformers_model(part: Part, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """By `from_pretrained` itself, given no tensor at all: it initializes what it misses, on the device."""
    config = part.cls.config_class.from_pretrained(str(part.folder), local_files_only=True)
    model: torch.nn.Module = part.cls.from_pretrained(
        None,
        config=config,
        state_dict={},
        dtype=dtype,
        device_map=None if device.type == "cpu" else {"": device},
    )
    kept = _kept_in_fp32(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.float()
    return model


def _kept_in_fp32(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """transformers keeps some tensors out of fp16, and some out of both 16-bit types; it searches for globs."""
    names: set[str] = set()
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(model._keep_in_fp32_modules_strict or ())
    return [re.compile(name.replace("*", ".*")) for name in sorted(names)]

"""A model of diffusers whose checkpoint has it quantized: its layers become PackedLinears, all else is as in the files.

What the tensors of a layer mean is for `polymux.quantization.prequantized` to know. Every tensor that the model needs
must be there, as with any other component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from polymux.errors import CheckpointError
from polymux.loading.component import Part, check_report
from polymux.loading.empty import empty_diffusers_model
from polymux.loading.index import read_json
from polymux.loading.libraries import reading
from polymux.loading.weights import Weights
from polymux.quantization.layer import PackedLinear, replace_layer
from polymux.quantization.prequantized import WEIGHT, ReadLayer
from polymux.quantization.selection import linear_layers


def load_packed(part: Part, weights: Weights, dtype: torch.dtype, read_layer: ReadLayer) -> torch.nn.Module:
    """The model, on the host. Raises CheckpointError that names what does not fit."""
    who = f"{part.name} ({part.cls.__name__})"
    if not weights.safetensors:
        raise CheckpointError(f"{weights.main}: {who}: quantized weights are read from safetensors files only")
    config = read_json(part.folder / "config.json")
    with reading(f"{weights.main}: {who}"):
        state: dict[str, torch.Tensor] = {}
        for file in weights.files:
            with safe_open(file, "pt") as tensors:
                state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # it is no dict
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        model = empty_diffusers_model(part.cls, plain, dtype)
        for path, layer in linear_layers(model).items():
            names = [name for name in state if name.startswith(f"{path}.weight")]
            mine = {name.removeprefix(f"{path}.weight"): state[name] for name in names}
            found = read_layer(mine) if WEIGHT in mine else None
            if found is not None:
                shape = (layer.out_features, layer.in_features)
                replace_layer(model, path, PackedLinear(shape, layer.bias, dtype, *found))
                for name in (*names, f"{path}.input_scale"):
                    state.pop(name, None)
    check_report(part, weights, _fill(model, state, dtype))
    return model


def _fill(model: torch.nn.Module, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Give the model what is left in the files; what did not fit, as the libraries report it."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if tensor.device.type == "meta"}
    mismatched = [(n, state[n].shape, t.shape) for n, t in wanted.items() if n in state and state[n].shape != t.shape]
    in_fp32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    values = {}
    for name in wanted.keys() & state.keys():
        target = torch.float32 if any(part in in_fp32 for part in name.split(".")) else dtype
        values[name] = state[name].to(target) if state[name].is_floating_point() else state[name]
    if not mismatched:
        model.load_state_dict(values, strict=False, assign=True)
    return {
        "mismatched_keys": mismatched,
        "missing_keys": sorted(wanted.keys() - state.keys()),
        "unexpected_keys": sorted(state.keys() - model.state_dict().keys()),
        "error_msgs": [],
    }

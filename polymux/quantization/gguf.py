"""Layers whose weights come out of a GGUF file: the file's own bytes, unpacked by diffusers' functions.

diffusers' loader makes layers whose weights are a kind of tensor of its own, which cannot be streamed or mapped; here
they become `PackedLinear`s, which compute the same.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from polymux.quantization.layer import PackedLinear, replace_layer, run_unpacked


@dataclass(frozen=True)
class GGUF:
    """`kind`: the type of the file's tensor, by its number."""

    kind: int
    title: str

    @property
    def name(self) -> str:
        return f"{self.title}, weights only"

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError("layers of a GGUF file come packed")

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        return unpacked(layer.get_parameter("codes"), self.kind, dtype)

    def run(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return run_unpacked(layer, x)


def unpacked(codes: torch.Tensor, kind: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that a tensor of a GGUF file stands for. Scales in it are fp16, and so is what is computed with them,
    unless more was asked for."""
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES, dequantize_functions  # needs gguf, which is optional
    from gguf import GGMLQuantizationType

    number = GGMLQuantizationType(kind)
    weights, nbytes = GGML_QUANT_SIZES[number]
    between = torch.float32 if dtype == torch.float32 else None
    blocks: torch.Tensor = dequantize_functions[number](codes.view(-1, nbytes), weights, nbytes, between)
    return blocks.reshape(*codes.shape[:-1], -1).to(dtype)


def make_plain(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Of a model that diffusers has read from a GGUF file: its linear layers become PackedLinears, and what else is
    quantized is unpacked, since only linear layers know how to compute with it."""
    from diffusers.quantizers.gguf.utils import GGUFParameter

    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, GGUFParameter):
                continue
            kind: Any = parameter.quant_type
            codes = parameter.as_tensor().detach().view(torch.uint8)
            if name == "weight" and isinstance(module, torch.nn.Linear):
                bias = None if module.bias is None else torch.nn.Parameter(module.bias.to(dtype), requires_grad=False)
                shape, format = (module.out_features, module.in_features), GGUF(int(kind), f"gguf {kind.name}")
                replace_layer(model, path, PackedLinear(shape, bias, dtype, format, {"codes": codes}))
                break
            value = unpacked(codes, int(kind), dtype)
            module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def is_read_for(cls: type) -> bool:
    """Whether diffusers knows the names that tensors of such a model have in single files."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    return any(base.__name__ in SINGLE_FILE_LOADABLE_CLASSES for base in cls.__mro__)


def is_installed() -> bool:
    return importlib.util.find_spec("gguf") is not None

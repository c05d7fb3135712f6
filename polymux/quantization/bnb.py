"""bitsandbytes' formats of four bits: nf4 and fp4, 64 weights to a scale. The arithmetic is the package's own."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from polymux.quantization.layer import PackedLinear, as_bytes, replace_layer, run_unpacked

BLOCK = 64  # weights that share a scale, in rows laid end to end


@dataclass(frozen=True)
class BnB4:
    """`kind`: nf4 or fp4."""

    kind: str
    block: int = BLOCK

    @property
    def name(self) -> str:
        return f"{self.kind}, weights only"

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        count = weight.numel()
        if weight.device.type == "meta":
            sizes = {"codes": (-(-count // 2), 1), "scale": (-(-count // self.block) * 4,), "table": (64,)}
            return {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()}
        from bitsandbytes.functional import quantize_4bit  # optional, and slow to import

        return parts_of(*quantize_4bit(weight.contiguous(), blocksize=self.block, quant_type=self.kind))

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        absmax, table = (layer.get_parameter(name).view(torch.float32) for name in ("scale", "table"))
        # Rows laid end to end, as they are packed: on a CPU the package takes rows that end within a block for others.
        flat = torch.Size((layer.out_features * layer.in_features,))
        state: Any = QuantState(
            absmax=absmax, shape=flat, code=table, blocksize=self.block, quant_type=self.kind, dtype=dtype
        )
        weight: torch.Tensor = dequantize_4bit(layer.get_parameter("codes"), state)
        return weight.view(layer.out_features, layer.in_features)

    def run(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return run_unpacked(layer, x)

    @staticmethod
    def fits(layer: torch.nn.Linear) -> bool:
        return True


def parts_of(codes: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
    """Of a weight that bitsandbytes has quantized. Scales that are quantized themselves are unpacked."""
    from bitsandbytes.functional import dequantize_blockwise

    scale = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return {"codes": as_bytes(codes), "scale": as_bytes(scale.float()), "table": as_bytes(state.code.float())}


def make_plain(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """The layers of four bits of a model that its library has loaded become PackedLinears, which compute the same."""
    if not is_installed():
        return
    from bitsandbytes.nn import Linear4bit

    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            state: Any = layer.weight.quant_state
            codes = layer.weight.detach().as_subclass(torch.Tensor)
            shape, format = (layer.out_features, layer.in_features), BnB4(state.quant_type, state.blocksize)
            replace_layer(model, path, PackedLinear(shape, layer.bias, dtype, format, parts_of(codes, state)))


def is_installed() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None

"""The formats that are polymux's own: eight bits with a scale for each row, four bits with one for each group.

Everything is plain torch, on any device. Scales are numbers that bf16 has, so that multiplying with one in bf16 rounds
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from polymux.quantization.layer import PackedLinear, as_bytes, run_unpacked
from polymux.quantization.rows import quantized_rows

GROUPS = (64, 32, 16, 8)  # weights that share a scale, in a format of four bits; the first that divides a row
FEWEST_ROWS = 32  # the integer product of some devices takes no fewer than 17


def scale_of(weight: torch.Tensor, largest: float) -> torch.Tensor:
    """What the numbers of the last dimension are multiples of, if the largest of them becomes `largest`."""
    scale = weight.float().abs().amax(-1, keepdim=True) / largest
    return scale.clamp_(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16).float()


def scaled(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`codes` times fp32 `scale`. fp16 has no place for small scales, so it is the type of the result only."""
    between = torch.float32 if dtype == torch.float16 else dtype
    return (codes.to(between) * scale.to(between)).to(dtype)


@dataclass(frozen=True)
class RowFormat:
    """Eight bits, a scale for each row. `dynamic`: inputs are quantized too, each token with its own scale."""

    dynamic: bool
    code: ClassVar[torch.dtype]
    largest: ClassVar[float]
    title: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.title}, {'each token quantized too (W8A8)' if self.dynamic else 'weights only'}"

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = scale_of(weight, self.largest)
        codes = (weight.float() / scale).clamp_(-self.largest, self.largest)
        if not self.code.is_floating_point:
            codes = codes.round_()
        return {"codes": as_bytes(codes.to(self.code)), "scale": as_bytes(scale)}

    def codes(self, layer: PackedLinear) -> torch.Tensor:
        return layer.get_parameter("codes").view(self.code)

    def scale(self, layer: PackedLinear) -> torch.Tensor:
        """(out, 1)"""
        return layer.get_parameter("scale").view(torch.float32)

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        return scaled(self.codes(layer), self.scale(layer), dtype)

    def run(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        if not self.dynamic:
            return run_unpacked(layer, x)
        codes, scale = quantized_rows(x.reshape(-1, layer.in_features), self.code, self.largest)
        y = self.product(layer, codes, scale).to(x.dtype)
        if layer.bias is not None:
            y = y + layer.bias
        return y.view(*x.shape[:-1], layer.out_features)

    def product(self, layer: PackedLinear, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def fits(layer: torch.nn.Linear) -> bool:
        """Whether the product of quantized inputs and weights takes matrices of this shape."""
        return layer.in_features % 16 == 0 and layer.out_features % 16 == 0


@dataclass(frozen=True)
class FP8(RowFormat):
    code = torch.float8_e4m3fn
    largest = 448.0
    title = "fp8"

    def product(self, layer: PackedLinear, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        # With scales for rows, GPUs have a product that puts out bf16, and no other type.
        return torch._scaled_mm(
            codes,
            self.codes(layer).t(),
            scale_a=scale,
            scale_b=self.scale(layer).t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # sums of products of eight bits: no worse, and faster
        )


@dataclass(frozen=True)
class INT8(RowFormat):
    code = torch.int8
    largest = 127.0
    title = "int8"

    def product(self, layer: PackedLinear, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = codes.shape[0]
        if rows < FEWEST_ROWS:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, FEWEST_ROWS - rows))
        return torch._int_mm(codes, self.codes(layer).t())[:rows] * scale * self.scale(layer).t()


@dataclass(frozen=True)
class INT4:
    """Four bits, -7 to 7, two to a byte, a scale for each group of a row's weights."""

    name: ClassVar[str] = "int4, weights only"

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = weight.shape
        groups = weight.reshape(rows, -1, self._group(columns))
        scale = scale_of(groups, 7.0)
        codes = (groups.float() / scale).round_().clamp_(-7, 7).add_(8).to(torch.uint8).view(rows, columns)
        return {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scale": as_bytes(scale.squeeze(-1))}

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        packed, scale = layer.get_parameter("codes"), layer.get_parameter("scale").view(torch.float32)
        codes = torch.stack((packed & 15, packed >> 4), -1).view(torch.int8) - 8
        return scaled(codes.view(*scale.shape, -1), scale.unsqueeze(-1), dtype).view(packed.shape[0], -1)

    def run(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return run_unpacked(layer, x)

    @staticmethod
    def fits(layer: torch.nn.Linear) -> bool:
        return layer.in_features % GROUPS[-1] == 0

    @staticmethod
    def _group(columns: int) -> int:
        return next(size for size in GROUPS if columns % size == 0)


@dataclass(frozen=True)
class MXFP8:
    """fp8, a power of two as the scale for each 32 weights of a row. Only read, never made."""

    name: ClassVar[str] = "mxfp8, weights only"

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError("layers in mxfp8 come packed")

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        codes = layer.get_parameter("codes").view(torch.float8_e4m3fn)
        scale = torch.exp2(layer.get_parameter("scale").float() - 127).unsqueeze(-1)
        return scaled(codes.view(*scale.shape[:-1], -1), scale, dtype).view(codes.shape)

    def run(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return run_unpacked(layer, x)

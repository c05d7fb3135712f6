"""Quantizes the inputs of a layer: each row, which is a token, with a scale of its own.

On a GPU in one pass of a Triton kernel, where torch alone would need five, and more time than the product that comes
after it.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

SMALLEST = 1e-12  # of a row of zeros
WIDEST = 2**16  # columns that a kernel holds at once


def quantized_rows(x: torch.Tensor, code: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) as codes, and their scales (rows, 1) in fp32."""
    # A compiler makes one pass of it by itself, and cannot look into other people's kernels.
    if x.device.type == "cuda" and x.shape[1] <= WIDEST and not torch.compiler.is_compiling() and _has_triton():
        return _in_one_pass(x.contiguous(), code, largest)
    scale = x.abs().amax(-1, keepdim=True).float().clamp_(min=SMALLEST) / largest
    codes = (x / scale).clamp_(-largest, largest)
    return (codes if code.is_floating_point else codes.round_()).to(code), scale


def _in_one_pass(x: torch.Tensor, code: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=code, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        width = 1 << (columns - 1).bit_length()
        _kernel()[(rows,)](x, codes, scale, columns, largest, SMALLEST, not code.is_floating_point, width)
    return codes, scale


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel() -> Any:
    """Made when it is first needed: triton is there on machines with a GPU only."""
    from polymux.quantization.rows_triton import quantize_row

    return quantize_row

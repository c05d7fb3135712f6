"""Quantizes the inputs of a layer: each row, which is a token, with a scale of its own."""

from __future__ import annotations

import torch

SMALLEST = 1e-12  # of a row of zeros


def quantized_rows(x: torch.Tensor, code: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) as codes, and their scales (rows, 1) in fp32."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_(min=SMALLEST) / largest
    codes = (x / scale).clamp_(-largest, largest)
    return (codes if code.is_floating_point else codes.round_()).to(code), scale

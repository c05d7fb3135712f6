"""Which dtype the weights get. Knows nothing of models: those that keep parts in fp32 say so to their library."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def auto_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for a `dtype` setting. CPUs are one to two orders of magnitude slower in 16 bits, so auto avoids it."""
    if name != "auto":
        return DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16

"""Which dtype weights get."""

from __future__ import annotations

import pytest
import torch

from polymux.loading import auto_dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    assert auto_dtype(name, torch.device("cpu")) == dtype

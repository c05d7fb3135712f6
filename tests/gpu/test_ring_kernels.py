"""The kernels of ring attention: results, and the sums of weights that put parts together."""

from __future__ import annotations

import pytest
import torch

from polymux.parallel.ring import attend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (1170, 1169)])
def test_results_and_sums(dtype: torch.dtype, masked: bool, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, queries, 3, 128, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 2, keys, 3, 128, device="cuda", dtype=dtype)
    bias = torch.randn(2, 1, 1, keys, device="cuda", dtype=dtype) if masked else None
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) * 128**-0.5
    if bias is not None:
        scores = scores + bias.double()
    out, sums = attend(query, key, value, bias, None)
    close = 2e-2 if dtype == torch.bfloat16 else 2e-3
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value.double())
    torch.testing.assert_close(out.double(), wanted, atol=close, rtol=close)
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), atol=close, rtol=close)

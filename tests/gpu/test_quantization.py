"""Quantized layers and engines on a CUDA device: products that a CPU does not have, and the same results otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.quantization.bnb import BnB4
from polymux.quantization.formats import FP8, INT4, INT8
from polymux.quantization.layer import Format, pack_linear
from polymux.quantization.requirements import lack_for_dynamic
from polymux.quantization.rows import quantized_rows
from polymux.request import Event, Finished, OmniDiffusionSamplingParams, Request

CPU = torch.device("cpu")
CODES = ((torch.float8_e4m3fn, 448.0), (torch.int8, 127.0))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def needs(format: Format, device: torch.device) -> None:
    method = "fp8" if isinstance(format, FP8) else "int8"
    if isinstance(format, (FP8, INT8)) and format.dynamic and (lack := lack_for_dynamic(method, device)):
        pytest.skip(lack)
    if isinstance(format, BnB4):
        pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (300, 3072), (40, 13824)])
def test_inputs_are_quantized_as_on_a_cpu(dtype: torch.dtype, rows: int, columns: int, device: torch.device) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    for code, largest in CODES:
        expected, scale = quantized_rows(x.float(), code, largest)
        got, own = quantized_rows(x.to(device), code, largest)
        assert (own.cpu() - scale).abs().max() <= 1e-6 * scale.max()
        assert (got.cpu().float() != expected.float()).float().mean() < 0.01, "numbers half way may go either way"


@pytest.mark.parametrize(
    "format", [FP8(True), FP8(False), INT8(True), INT8(False), INT4(), BnB4("nf4")], ids=lambda f: f.name
)
@pytest.mark.parametrize("tokens", [1, 77])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_is_that_of_a_cpu(format: Format, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    needs(format, device)
    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 128, dtype=dtype).requires_grad_(False)
    x = torch.randn(2, tokens, 256).to(dtype)
    packed = pack_linear(plain.to(device), format, device)
    got = packed(x.to(device)).cpu().float()
    expected = F.linear(x.float(), packed.weight.cpu().float(), packed.bias.cpu().float())
    dynamic = isinstance(format, (FP8, INT8)) and format.dynamic
    assert got.isfinite().all()
    assert (got - expected).norm() <= (0.05 if dynamic else 0.01) * expected.norm()


@pytest.mark.parametrize("flags", [{}, {"enable_cpu_offload": True}, {"enable_layerwise_offload": True}], ids=str)
@pytest.mark.parametrize("method", ["fp8", "int8", "int4", "nf4"])
def test_an_engine(method: str, flags: dict[str, Any], tiny_checkpoint: Callable[..., Path]) -> None:
    if method == "nf4":
        pytest.importorskip("bitsandbytes")
    folder = str(tiny_checkpoint("qwen-image"))
    plain = picture(DiffusionEngine.load(EngineConfig.from_flat(model=folder, enforce_eager=True)))
    engine = DiffusionEngine.load(
        EngineConfig.from_flat(model=folder, quantization=method, enforce_eager=True, **flags)
    )
    got = picture(engine)
    wanted = "W8A8" if method == "fp8" and lack_for_dynamic("fp8", engine.device) is None else "weights only"
    assert wanted in engine.described.quantized["transformer"]
    assert np.isfinite(got).all() and 0 < np.abs(got - plain).mean() < 0.1
    engine.close()


def picture(engine: DiffusionEngine) -> np.ndarray[Any, Any]:
    params = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=3, seed=1, output_type="np")
    engine.add(Request(request_id="a", prompt="a photo of a cat", params=params))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    assert isinstance(events[-1], Finished), events[-1]
    return from_wire(events[-1].outputs[0][0])

"""Offload on CUDA devices: order between copies and computation, bit-equal outputs, memory that is really free."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig, stage_environment
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.memory.block_stream import BlockStream
from polymux.memory.exchange import Exchange
from polymux.memory.layout import layout_of
from polymux.memory.measure import bandwidth
from polymux.memory.private_blocks import PrivateBlocks
from polymux.memory.slots import Slots
from polymux.request import Finished, OmniDiffusionSamplingParams, Request

DEVICE = torch.device("cuda", 0)
UNITS = Path(__file__).parents[1] / "unit"


class Deep(torch.nn.Module):
    """Blocks of 8 to 64 MiB; some compute for much longer than they take to arrive, and some for much shorter."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        sizes = [1024 * (1 + 3 * i % 8) for i in range(blocks)]
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(2048, n), torch.nn.Tanh(), torch.nn.Linear(n, 2048)) for n in sizes
        )
        self.to(DEVICE).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            rows = x if index % 3 else x[:8]  # a short computation: the next copy must not overtake it
            x = torch.cat([x[: len(x) - len(rows)], rows + torch.tanh(block(rows))])
        return x


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 5, 12])
def test_streaming_is_bit_equal_however_copies_and_computation_race(blocks: int, slots: int) -> None:
    torch.manual_seed(0)
    model = Deep(blocks)
    inputs = [torch.randn(rows, 2048, device=DEVICE) for rows in (16, 4096, 16384, 64)]
    wanted = [model(x) for x in inputs]
    source = PrivateBlocks(model, layout_of(model, [f"blocks.{i}" for i in range(blocks)]), DEVICE)
    ring = Slots(slots, source.slot_bytes, DEVICE)
    ring.allocate()
    stream = BlockStream(model, source, ring)
    results = []
    for turn in range(24):  # launched without waiting for anything in between
        stream.begin()
        results.append(model(inputs[turn % 4]))
        stream.end()
    assert all(torch.equal(result, wanted[turn % 4]) for turn, result in enumerate(results))
    assert stream.missed == 0
    stream.close()


def test_exchange_moves_at_bus_speed_and_memory_never_grows() -> None:
    torch.manual_seed(0)
    models = {"one": Deep(6), "two": Deep(12), "three": Deep(3)}
    x = torch.randn(256, 2048, device=DEVICE)
    wanted = {name: model(x) for name, model in models.items()}
    exchange = Exchange([{name: model} for name, model in models.items()], DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for name in models:
        exchange.before(name)
        models[name](x)
    reserved = torch.cuda.memory_reserved()
    for name in ("two", "one", "three", "two", "three", "one") * 5:
        exchange.before(name)
        assert torch.equal(models[name](x), wanted[name])
    assert torch.cuda.memory_reserved() == reserved
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    moved = sum(exchange.moved.values())
    begin.record()
    for name in ("two", "one") * 4:
        exchange.before(name)
    end.record()
    end.synchronize()
    rate = (sum(exchange.moved.values()) - moved) / begin.elapsed_time(end) * 1e3
    assert rate > 0.7 * bandwidth(DEVICE)  # far above what pageable memory gives
    exchange.close()


FLAGS: dict[str, dict[str, Any]] = {
    "model-level": {"enable_cpu_offload": True},
    "layerwise": {"enable_layerwise_offload": True, "dlo_prefetch_layers": 0},
    "distributed": {"enable_distributed_layerwise_offload": True, "dlo_prefetch_layers": 1},
    "auto": {"gpu_memory_limit_gib": "auto"},
}


def picture(engine: DiffusionEngine) -> np.ndarray[Any, Any]:
    params = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=3, seed=1, output_type="np")
    engine.add(Request(request_id="a", prompt="a cat", params=params))
    events = []
    while engine.busy:
        events += engine.step()
    assert isinstance(events[-1], Finished), events[-1]
    return from_wire(events[-1].outputs[0][0])


@pytest.mark.parametrize("name", ["flux-dev", "qwen-image", "sd15"])
def test_every_strategy_is_bit_equal_also_after_sleep(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    def load(**flags: Any) -> DiffusionEngine:
        folder = str(tiny_checkpoint(name))
        return DiffusionEngine.load(EngineConfig.from_flat(model=folder, device="cuda:0", enforce_eager=True, **flags))

    wanted = picture(load())
    for flags in ({}, *FLAGS.values()):
        engine = load(**flags)
        np.testing.assert_array_equal(picture(engine), wanted)
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            np.testing.assert_array_equal(picture(engine), wanted)
        engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleep_reports_is_free(level: int) -> None:
    engine = DiffusionEngine.load(EngineConfig.from_flat(model="demo", device="cuda:0"))
    picture(engine)
    ballast = torch.nn.Parameter(torch.ones(2**29, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)  # 1 GiB
    engine.components[0].module.register_parameter("ballast", ballast)
    del ballast
    before, _ = torch.cuda.mem_get_info(DEVICE)
    freed = engine.sleep(level)
    after, _ = torch.cuda.mem_get_info(DEVICE)
    assert freed >= 2**30 and abs(after - before - freed) < 64 * 2**20
    engine.wake_up()
    picture(engine)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_gather_over_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memory.gather_worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), "cuda"],
            stdout=subprocess.PIPE, cwd=UNITS, env=stage_environment() | {"NCCL_NVLS_ENABLE": "0"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        lines = [line for rank in ranks for line in rank.communicate(timeout=300)[0].splitlines() if line[:1] == b"{"]
    finally:
        for rank in ranks:
            rank.kill()
    reports = [json.loads(line) for line in lines]
    assert len(reports) >= 16 and not [report for report in reports if report["problem"]]

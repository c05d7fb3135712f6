"""Every tiny pipeline under every offload strategy: the output is the one without, bit for bit.

fp32 on a CPU. All weights are copied out of the mapped file first: where a tensor begins in memory decides in which
order a CPU takes sums.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.families.features import features_by_pipeline
from polymux.loading import load_pipeline
from polymux.memory import exchange
from polymux.memory.block_stream import BlockStream
from polymux.request import Failed, StageStats
from polymux.testing.tiny import TINY, names

from .reference import Arrays, distance, request, takes_steps
from .small import choose_small, small_call
from .test_families import EIGHT_BITS, LONG, TOLERANCE, another, arrays, drive

CPU = torch.device("cpu")

STRATEGIES: dict[str, dict[str, Any]] = {
    "model-level": {"enable_cpu_offload": True},
    # One slot: every block goes through it, however few there are.
    "layerwise": {"enable_layerwise_offload": True, "dlo_prefetch_layers": 0},
    "distributed": {"enable_distributed_layerwise_offload": True, "dlo_prefetch_layers": 1},
}

# Of streams, one for both: what a group of calls asks of a stream does not depend on where its blocks come from.
IN_COMPANY = {"model-level", "distributed"}


class Run:
    """What an engine with these flags makes: of one request alone; with `company`, also of several, one aborted."""

    def __init__(self, name: str, folder: Path, flags: dict[str, Any], company: bool) -> None:
        config = EngineConfig.from_flat(model=str(folder), **flags)
        pipeline = load_pipeline(config.model, CPU, torch.float32, components=dict(TINY[name].load))
        for module in pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.clone()
        self.engine = DiffusionEngine(config, pipeline, CPU)
        output_type = "latent" if name in EIGHT_BITS else "np"
        call = small_call(name, self.engine.pipeline)
        steps = call.pop("num_inference_steps", 2)
        counted = takes_steps(self.engine.pipeline)
        first = call | ({"num_inference_steps": steps} if counted else {})
        second = another(name, call) | ({"num_inference_steps": steps + 1} if counted else {})
        self.engine.add(request(first, "alone", 1, output_type))
        self.alone: Arrays = arrays(drive(self.engine)["alone"])
        self.stats: StageStats = self.engine.stats
        if not company:
            return
        before = self.engine.stats.steps
        self.engine.add(request(first, "left", 3, output_type))
        self.engine.add(request(second, "company", 2, output_type))
        while self.engine.stats.steps < before + 1:
            self.engine.step()
        self.engine.abort("left")
        done = drive(self.engine)
        assert isinstance(done["left"], Failed)
        self.company: Arrays = arrays(done["company"])

    @property
    def streams(self) -> list[BlockStream]:
        return list(self.engine.weights._streams.values())


@pytest.mark.parametrize("name", [*names("diffusers"), *names("modular")])
def test_family(name: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    choose_small(name, monkeypatch)
    monkeypatch.setattr(exchange, "SMALL", 2**10)
    folder = tiny_checkpoint(name)
    plain = Run(name, folder, {}, name not in LONG)
    described = plain.engine.described
    found = features_by_pipeline()[described.pipeline]
    assert found == described.features, "python -m polymux.testing.features makes the list"
    plain.engine.close()
    for strategy, flags in STRATEGIES.items():
        run = Run(name, folder, flags, strategy in IN_COMPANY and name not in LONG)
        assert distance(run.alone, plain.alone) == 0, strategy
        if strategy in IN_COMPANY and name not in LONG:
            assert distance(run.company, plain.company) <= TOLERANCE, strategy
        assert run.engine.weights.plan.strategy == ("model-level" if strategy == "model-level" else "layerwise")
        assert sum(stream.missed for stream in run.streams) == 0, "the blocks do not run in the declared order"
        if strategy == "layerwise":
            looped = {component.name for component in run.engine.components if component.looped}  # not streamed
            calls = sum(count for name, count in run.stats.calls.items() if name not in looped)
            assert sum(stream.fetched for stream in run.streams) > calls / 3
        assert sum(run.stats.offload_bytes.values()) > 0 and not any(run.stats.offload_late.values())
        run.engine.close()

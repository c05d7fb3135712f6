"""Compiled blocks on a GPU: as near to the eager ones as rounding is, also streamed and quantized, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.request import Event, Failed, Finished, LoRARequest, OmniDiffusionSamplingParams, Request

OTHERS = [{}, {"enable_layerwise_offload": True}, {"quantization": "int8"}]


def pictures(engine: DiffusionEngine) -> list[np.ndarray[Any, Any]]:
    """One alone, of two sizes, and two at once."""
    made = []
    for batch in (("a",), ("b",), ("a", "b")):
        for name in batch:
            height = 64 if name == "a" else 96
            params = OmniDiffusionSamplingParams(
                height=height, width=64, num_inference_steps=2, seed=1, output_type="np"
            )
            engine.add(Request(request_id=name, prompt=f"a photo of {name}", params=params))
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
        done = {event.request_id: event for event in events if isinstance(event, Finished)}
        made += [np.asarray(from_wire(done[name].outputs[0][0])) for name in batch]
    return made


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_as_eager(others: dict[str, Any], tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("qwen-image"))
    torch._dynamo.reset()
    counters.clear()

    def load(**knobs: Any) -> DiffusionEngine:
        return DiffusionEngine.load(EngineConfig.from_flat(model=folder, dtype="fp32", **others, **knobs))

    plain = load(enforce_eager=True)
    wanted = pictures(plain)
    plain.close()
    assert counters["stats"]["unique_graphs"] == 0
    engine = load(compilation_config={"cache_dir": str(tmp_path)})
    for got, expected in zip(pictures(engine), wanted, strict=True):
        assert np.abs(got - expected).max() < 2e-3
    assert 1 <= counters["stats"]["unique_graphs"] <= 4
    assert any(tmp_path.rglob("*"))
    engine.close()


def test_adapters_compile_nothing_for_others(
    tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    folder, config = str(tiny_checkpoint("qwen-image")), {"cache_dir": str(tmp_path)}
    engine = DiffusionEngine.load(EngineConfig.from_flat(model=folder, dtype="fp32", compilation_config=config))
    engine.warm_up()
    plain, before = pictures(engine), counters["stats"]["unique_graphs"]
    params = OmniDiffusionSamplingParams(
        height=64, width=64, num_inference_steps=2, lora=(LoRARequest(path=str(tiny_lora("qwen-image"))),)
    )
    engine.add(Request(request_id="tuned", prompt="a photo of a cat", params=params))
    while engine.busy:
        assert not any(isinstance(event, Failed) for event in engine.step())
    for got, expected in zip(pictures(engine), plain, strict=True):
        assert np.abs(got - expected).max() < 2e-3
    assert counters["stats"]["unique_graphs"] == before
    engine.close()

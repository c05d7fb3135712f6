"""An engine that has slept generates what it generated before, and meanwhile holds no weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import NotReadyError
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, OmniDiffusionSamplingParams, Request

FLAGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "model-level": {"enable_cpu_offload": True},
    "layerwise": {"enable_layerwise_offload": True, "dlo_prefetch_layers": 0},
}


def request(name: str = "a") -> Request:
    params = OmniDiffusionSamplingParams(num_inference_steps=2, height=64, width=64, seed=3)
    return Request(request_id=name, prompt="a cat", params=params)


def generate(engine: DiffusionEngine) -> np.ndarray[Any, Any]:
    engine.add(request())
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    last = events[-1]
    assert isinstance(last, Finished), last
    return from_wire(last.outputs[0][0])


@pytest.mark.parametrize("strategy", FLAGS)
def test_sleeping_changes_nothing(strategy: str, tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("flux-dev")), device="cpu", **FLAGS[strategy])
    engine = DiffusionEngine.load(config)
    wanted = generate(engine)
    for level in (1, 2, 1):
        assert engine.sleep(level) >= 0
        with pytest.raises(NotReadyError, match="asleep"):
            engine.add(request())
        with pytest.raises(NotReadyError, match=f"level {level}"):
            engine.sleep(1)
        assert engine.step() == []
        engine.wake_up()
        np.testing.assert_array_equal(generate(engine), wanted)
    engine.sleep(2)
    engine.close()


def test_at_level_two_nothing_keeps_the_modules_alive(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = DiffusionEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint("flux-dev")), device="cpu"))
    generate(engine)
    modules = [weakref.ref(component.module) for component in engine.components]
    assert len(modules) == 4
    engine.sleep(2)
    gc.collect()
    assert [m() for m in modules] == [None] * 4


def test_the_bytes_that_are_reported_are_gone() -> None:
    """On a CPU the device's memory is the resident set. The model is blown up by a buffer of 256 MiB."""
    engine = DiffusionEngine.load(EngineConfig.from_flat(model="demo", device="cpu"))
    engine.components[0].module.register_buffer("ballast", torch.ones(64 * 2**20))
    freed = engine.sleep(2)
    assert 250 * 2**20 < freed < 400 * 2**20
    engine.wake_up()
    generate(engine)


def test_an_engine_that_is_busy_does_not_sleep() -> None:
    engine = DiffusionEngine.load(EngineConfig.from_flat(model="demo", device="cpu"))
    engine.add(request())
    with pytest.raises(NotReadyError, match="busy"):
        engine.sleep(1)
    while engine.busy:
        engine.step()
    engine.sleep(1)

"""Calls of denoisers as CUDA graphs: what they give is what the calls give, whoever else is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.call_graphs import DUE, CallGraphs
from polymux.diffusion.component import Component
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, LoRARequest, OmniDiffusionSamplingParams, Request

ON = {"cudagraphs": True}
STEPS = DUE + 3
DEVICE = torch.device("cuda", 0)
Pictures = list[np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=["qwen-image", "sd15", "z-image"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint(request.param))


def load(folder: str, **knobs: Any) -> DiffusionEngine:
    return DiffusionEngine.load(EngineConfig.from_flat(model=folder, dtype="fp32", **knobs))


def graphs_of(engine: DiffusionEngine) -> CallGraphs:
    assert engine.loaded.graphs is not None
    return engine.loaded.graphs


def ask(engine: DiffusionEngine, name: str, height: int = 64, **params: Any) -> None:
    values = {"height": height, "width": 64, "num_inference_steps": STEPS, "output_type": "np", "seed": ord(name[0])}
    prompt = f"a photo of {'a cat at sea ' * (ord(name[0]) % 3)}"  # of different lengths
    engine.add(Request(request_id=name, prompt=prompt, params=OmniDiffusionSamplingParams(**values | params)))


def outcome(engine: DiffusionEngine) -> dict[str, np.ndarray[Any, Any]]:
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    done = {event.request_id: event for event in events if isinstance(event, Finished)}
    return {name: np.asarray(from_wire(event.outputs[0][0])) for name, event in done.items()}


def one(engine: DiffusionEngine, name: str, **params: Any) -> np.ndarray[Any, Any]:
    ask(engine, name, **params)
    return outcome(engine)[name]


def pictures(engine: DiffusionEngine) -> Pictures:
    """Of two sizes; two at once of one size and of two; the first one again."""
    made = [one(engine, "a"), one(engine, "b", height=96)]
    for heights in ((64, 64), (64, 96)):
        for name, height in zip("ab", heights, strict=True):
            ask(engine, name, height=height)
        done = outcome(engine)
        made += [done["a"], done["b"]]
    return [*made, one(engine, "a")]


def near(ours: Pictures, theirs: Pictures, most: float = 1e-4) -> None:
    for got, want in zip(ours, theirs, strict=True):
        assert np.abs(got - want).max() < most


def test_as_without(folder: str) -> None:
    plain = load(folder, enforce_eager=True)
    want = [pictures(plain) for _ in range(2)]
    plain.close()
    engine = load(folder, enforce_eager=True, compilation_config=ON)
    got, graphs = [pictures(engine) for _ in range(2)], graphs_of(engine)
    near(got[0], want[0])
    near(got[1], want[1])
    assert graphs.replays > graphs.runs / 2 and not graphs.why and not graphs._said
    assert np.array_equal(got[1][0], got[1][-1])  # A, B, A
    engine.close()


def test_with_compiled_blocks(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("qwen-image"))
    torch._dynamo.reset()
    plain = load(folder, enforce_eager=True)
    want = pictures(plain)
    plain.close()
    engine = load(folder, compilation_config={"cache_dir": str(tmp_path)} | ON)
    engine.warm_up()
    pictures(engine)
    near(pictures(engine), want, most=2e-3)
    assert graphs_of(engine).replays > 0 and not graphs_of(engine)._said
    assert any(component.compiled is not None for component in engine.components)
    engine.close()


def test_abort_sleep_and_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = load(str(tiny_checkpoint("qwen-image")), enforce_eager=True, compilation_config=ON)
    want, graphs = one(engine, "a"), graphs_of(engine)
    assert graphs.kept and graphs.held > 0
    ask(engine, "b")
    ask(engine, "a")
    for _ in range(4):
        engine.step()
    engine.abort("b")
    assert np.abs(outcome(engine)["a"] - want).max() < 1e-4
    before = torch.cuda.memory_reserved()
    engine.sleep(1)
    assert not graphs.kept and torch.cuda.memory_reserved() < before
    engine.wake_up()
    assert np.array_equal(one(engine, "a"), want) and graphs.kept
    engine.sleep(2)
    engine.wake_up()
    assert np.array_equal(one(engine, "a"), want) and graphs_of(engine) is not graphs
    engine.close()


def test_adapters(tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path]) -> None:
    engine = load(str(tiny_checkpoint("qwen-image")), enforce_eager=True, compilation_config=ON)
    want, graphs = one(engine, "a"), graphs_of(engine)
    lora = LoRARequest(path=str(tiny_lora("qwen-image")), scale=1.0)
    kept, replays = graphs.kept, graphs.replays
    assert not np.array_equal(one(engine, "a", lora=(lora,)), want)
    assert graphs.replays == replays
    assert np.array_equal(one(engine, "a"), want)
    assert graphs.replays > replays and graphs.kept == kept
    engine.close()


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantized(tiny_checkpoint: Callable[..., Path], quantization: str) -> None:
    """Recorded, or not and said so: equal in any case."""
    folder = str(tiny_checkpoint("qwen-image"))
    made = []
    for knobs in ({}, {"compilation_config": ON}):
        engine = load(folder, enforce_eager=True, quantization=quantization, **knobs)
        made.append([one(engine, "a"), one(engine, "a")])
        if knobs:
            assert graphs_of(engine).replays > 0 or graphs_of(engine)._said
        engine.close()
    near(made[1], made[0], most=2e-3)


class Reading(torch.nn.Module):
    """Is refused before anything is recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum())


class Waiting(torch.nn.Module):
    """Breaks the recording."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x + 6
        torch.cuda.current_stream().synchronize()
        return made


@pytest.mark.parametrize("kind", [Reading, Waiting])
def test_what_cannot_be_recorded_leaves_the_device_as_it_was(kind: type[torch.nn.Module]) -> None:
    component, stream = Component("transformer", kind(), "denoiser"), torch.cuda.current_stream()
    graphs = CallGraphs.apply(EngineConfig.from_flat(model="m").compilation, [component], DEVICE, None)
    assert graphs is not None
    x = torch.ones(2, 3, device=DEVICE)
    with torch.no_grad():
        call = Call(CallOwner(), component, "forward", {"x": x}, TorchState.now("cuda"))
        for _ in range(DUE + 2):
            assert (graphs.run(call, {"x": x}) == 7).all()
        assert not graphs.kept and graphs._said
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
        torch.cuda.manual_seed(3)
        first = torch.rand(4, device=DEVICE)
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.rand(4, device=DEVICE), first)
        scaled = Component("transformer", torch.nn.Linear(3, 3).requires_grad_(False).to(DEVICE), "denoiser")
        others = CallGraphs.apply(EngineConfig.from_flat(model="m").compilation, [scaled], DEVICE, None)
        assert others is not None
        call = Call(CallOwner(), scaled, "forward", {"input": x}, TorchState.now("cuda"))
        want = scaled.run("forward", {"input": x})
        for _ in range(DUE + 2):
            assert torch.allclose(others.run(call, {"input": x}), want)
        assert others.replays > 0


def test_graphs_that_are_dropped_leave_room_for_others() -> None:
    """Of one that is kept at a time, and of memory that is given back."""
    layer = torch.nn.Linear(512, 512).requires_grad_(False).to(DEVICE)
    component = Component("transformer", layer, "denoiser")
    config = EngineConfig.from_flat(model="m", compilation_config=ON | {"cudagraph_max_graphs": 1}).compilation
    graphs = CallGraphs.apply(config, [component], DEVICE, None)
    assert graphs is not None
    with torch.no_grad():
        state = TorchState.now("cuda")
        for rows in (8, 4096, 8):
            x = torch.rand(rows, 512, device=DEVICE)
            call = Call(CallOwner(), component, "forward", {"input": x}, state)
            want = layer(x)
            for _ in range(300):
                assert torch.allclose(graphs.run(call, {"input": x}), want, atol=1e-5)
        assert graphs.kept == 1 and graphs.replays > 0
        held = graphs.held
        assert graphs.forget() and graphs.held < held

"""Calls that are recorded: which, that they give what the calls give, and what ends them. A tape stands for the GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import outcome, pixels, request_of
from small_denoisers import CPU, ON, Forward, Simple, add_one, put_in, small_engine

from polymux.compilation_config import Compilation
from polymux.config import EngineConfig
from polymux.diffusion import call_graphs
from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.call_graphs import DUE, FAILURES, CallGraphs
from polymux.diffusion.component import Component
from polymux.diffusion.recording import Recording
from polymux.diffusion.rehearsal import NotRecordable
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.request import LoRARequest
from polymux.testing.tape import TapeRecorder

GPU = torch.device("cuda")
SIZES = ((64, 64), (64, 128))


def graphs_of(engine: DiffusionEngine) -> CallGraphs:
    assert engine.loaded.graphs is not None
    return engine.loaded.graphs


def pictures(engine: DiffusionEngine, sizes: Any = SIZES) -> list[np.ndarray[Any, Any]]:
    """Of each size one alone, then two at once, and once more."""
    made = []
    for height, width in (*sizes, *sizes):
        for number in (1, 2):
            for i in range(number):
                engine.add(request_of(f"{i}", "abc"[i], steps=DUE + 1, seed=i, height=height, width=width))
            done = outcome(engine)
            made += [pixels(done[f"{i}"]) for i in range(number)]
    return made


class Calls:
    """Of one denoiser, without an engine."""

    def __init__(self, function: Forward, settings: Compilation = ON) -> None:
        self.component = Component("transformer", Simple(function), "denoiser")
        self.graphs = CallGraphs(settings, [self.component], CPU, TapeRecorder())

    def __call__(self, x: torch.Tensor, extra: Any = None, **changed: Any) -> Any:
        arguments = {"x": x, "extra": extra}
        with torch.no_grad():
            state = TorchState.now("cpu")
        call = Call(CallOwner(), self.component, "forward", arguments, state)
        with torch.no_grad():
            return self.graphs.run(replace(call, **changed), arguments)

    def often(self, x: torch.Tensor, extra: Any = None, **changed: Any) -> Any:
        """Until it would be replayed, and once more."""
        return [self(x, extra, **changed) for _ in range(DUE + 2)][-1]


def test_as_without() -> None:
    plain = pictures(small_engine(None))
    engine = small_engine()
    for ours, theirs in zip(pictures(engine), plain, strict=True):
        assert np.array_equal(ours, theirs)
    graphs = graphs_of(engine)
    forms = 4  # two sizes; two calls of guidance, and those of two requests
    assert graphs.kept == forms and not graphs.why
    assert graphs.replays > 20
    python = len(engine.pipeline.transformer.batches)  # three more for each recording
    assert python == graphs.runs - graphs.replays + 3 * forms
    queries, hits = engine.stats.cache_queries, engine.stats.cache_hits
    assert (queries["cuda_graphs"], hits["cuda_graphs"]) == (graphs.runs, graphs.replays)


def test_an_abort_leaves_others_alone() -> None:
    want = pictures(small_engine(None), SIZES[:1])[0]
    engine = small_engine()
    for i in range(3):
        engine.add(request_of("0", "a", steps=DUE + 1, seed=0))
        engine.add(request_of(f"gone {i}", "b", steps=50, seed=7))
        for _ in range(4):
            engine.step()
        engine.abort(f"gone {i}")
        assert np.array_equal(pixels(outcome(engine)["0"]), want)
    assert graphs_of(engine).replays > 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_drops_them(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    want, graphs = pictures(engine, SIZES[:1]), graphs_of(engine)
    assert graphs.kept
    if level == 1:
        engine.sleep(1)
        assert not graphs.kept
        engine.wake_up()
        for ours, theirs in zip(pictures(engine, SIZES[:1]), want, strict=True):
            assert np.array_equal(ours, theirs)
        assert graphs.kept
    else:
        monkeypatch.setattr(engine, "_load_again", lambda: small_engine(None).loaded)
        engine.sleep(2)
        assert not graphs.kept
        engine.wake_up()
        pictures(engine, SIZES[:1])
        assert not graphs.kept  # what was loaded again has its own


def test_adapters_leave_the_graphs_of_others(
    tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path]
) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("qwen-image")), dtype="fp32")
    engine = DiffusionEngine.load(config)
    graphs = put_in(engine)

    def picture(*adapters: LoRARequest) -> np.ndarray[Any, Any]:
        engine.add(request_of("0", steps=DUE + 2, height=64, width=64, lora=adapters))
        return pixels(outcome(engine)["0"])

    want = picture()
    kept, replays = graphs.kept, graphs.replays
    assert kept and replays
    assert not np.array_equal(picture(LoRARequest(path=str(tiny_lora("qwen-image")))), want)
    assert graphs.replays == replays
    assert np.array_equal(picture(), want)
    assert graphs.replays == replays + DUE + 2 and graphs.kept == kept
    engine.close()


def test_results_are_everybody_s_own() -> None:
    calls = Calls(lambda x, extra: {"sample": x + extra["y"][0], "number": 3})
    calls.often(torch.zeros(2, 3), {"y": [torch.ones(3)]})
    first = calls(torch.zeros(2, 3), {"y": [torch.ones(3)]})
    second = calls(torch.ones(2, 3), {"y": [torch.full((3,), 5.0)]})
    assert calls.graphs.replays == 3
    assert first["number"] == 3 and (first["sample"] == 1).all() and (second["sample"] == 7).all()


def test_weights_that_have_moved() -> None:
    calls = Calls(add_one)
    calls.often(torch.ones(2, 3))
    weight = calls.component.module.get_parameter("weight")
    weight.data = torch.tensor(5.0)
    assert (calls(torch.ones(2, 3))[0] == 6).all() and not calls.graphs.kept
    assert (calls.often(torch.ones(2, 3))[0] == 6).all() and calls.graphs.kept == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"adapters": (("a", 1.0),)},
        {"weights": torch.float64},
        {"state": replace(TorchState.now("cpu"), grad=True)},
        {"state": replace(TorchState.now("cpu"), grad=False, autocast=True)},
        {"method": "function.forward"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_calls_that_are_never_recorded(changed: dict[str, Any]) -> None:
    calls = Calls(add_one)
    calls.component.entries["function.forward"] = calls.component.entries["forward"]
    calls.often(torch.ones(2, 3), **changed)
    assert calls.graphs.runs == 0 and not calls.graphs.why
    calls.often(torch.ones(2, 3))
    assert calls.graphs.kept == 1


def test_auto_takes_what_is_small() -> None:
    calls = Calls(add_one, Compilation(cudagraph_max_tokens=8))
    calls.often(torch.ones(2, 5, 3))
    assert calls.graphs.runs == 0
    calls.often(torch.ones(2, 4, 3))
    assert calls.graphs.kept == 1


def _in_place(x: torch.Tensor, extra: Any) -> Any:
    extra.add_(1)
    return x


class _Drifting:
    """Whose result depends on what is no argument."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, x: torch.Tensor, extra: Any) -> Any:
        self.number += 1
        return x + self.number


def test_what_comes_from_the_host_is_given_again() -> None:
    two = np.array(2)
    calls = Calls(lambda x, extra: x + torch.tensor(extra[:3]) * torch.as_tensor(extra[3]) * torch.tensor(two) / 2)
    assert (calls.often(torch.ones(2, 3), [1, 2, 3, 2.0])[0] == torch.tensor([4, 6, 8])).all()
    assert (calls.often(torch.zeros(2, 3), [5, 5, 5, 1.0]) == 5).all()
    assert calls.graphs.kept == 2 and calls.graphs.replays == 2 and not calls.graphs._said


@pytest.mark.parametrize(
    ("function", "extra", "why"),
    [
        (
            lambda x, extra: x + float(x.sum()),
            None,
            "what it does depends on values that are on the device (aten._local",
        ),
        (
            lambda x, extra: x + 1 if x.sum() > 0 else x - 1,
            None,
            "what it does depends on values that are on the device",
        ),
        (lambda x, extra: x[x > 0], None, "what it does depends on values that are on the device (aten.index"),
        (lambda x, extra: x.nonzero(), None, "what it does depends on values that are on the device (aten.nonzero"),
        (add_one, object(), "an argument is a object"),
        (lambda x, extra: (x, object()), None, "a result is a object"),
        (_in_place, torch.zeros(2, 3), "it changes its arguments in place"),
        (lambda x, extra: x + torch.rand(3), None, "it draws random numbers"),
        (_Drifting(), None, "a recorded call does not give what the call gives"),
    ],
    ids=["reads", "branches", "masks", "counts", "argument", "result", "in place", "draws", "drifts"],
)
def test_what_cannot_be_recorded_runs_as_it_is(
    function: Forward, extra: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls(function)
    for _ in range(2):
        calls.often(torch.ones(2, 3), extra)
    assert calls.graphs.replays == 0 and not calls.graphs.kept
    assert caplog.text.count(why) == 1


def test_others_are_recorded_after_one_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(lambda x, extra: x + float(x.sum()) if len(x) > 2 else x)
    for rows in range(3, 3 + FAILURES - 1):
        calls.often(torch.ones(rows, 3))
    calls.often(torch.ones(2, 3))
    assert calls.graphs.kept == 1 and caplog.text.count("a call runs as it is: what it does depends on values") == 1
    calls.often(torch.ones(2 + FAILURES, 3))
    calls.often(torch.ones(1, 3))
    assert not calls.graphs.kept and "runs without from now on: what it does depends on values" in caplog.text


def test_results_without_numbers_prove_nothing() -> None:
    calls = Calls(lambda x, extra: x / extra)
    calls.often(torch.zeros(2, 3), torch.zeros(2, 3))
    assert calls.graphs.kept == 1 and calls.graphs.replays == 0
    assert (calls.often(torch.ones(2, 3), torch.ones(2, 3)) == 2).all() and calls.graphs.replays > 0


def test_what_a_model_keeps_for_a_size_is_held() -> None:
    tables: dict[int, torch.Tensor] = {}

    def function(x: torch.Tensor, extra: Any) -> torch.Tensor:
        if x.shape[1] not in tables:
            tables.clear()
            tables[x.shape[1]] = torch.arange(float(x.shape[1]))
        return x * tables[x.shape[1]]

    calls = Calls(function)
    calls.often(torch.ones(2, 3))
    table = weakref.ref(tables[3])
    calls.often(torch.ones(2, 4))
    gc.collect()
    assert table() is not None
    assert calls(torch.ones(1, 3).expand(2, 3)).tolist() == [[0, 2, 4]] * 2 and calls.graphs.kept == 2
    calls.graphs.forget()
    gc.collect()
    assert table() is None


def test_what_runs_often_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_graphs, "RECENT", 20)
    calls = Calls(add_one, Compilation(cudagraphs=True, cudagraph_max_graphs=2))
    for width in (1, 2, 3):
        calls.often(torch.ones(2, width))
    assert calls.graphs.kept == 2
    replays = calls.graphs.replays
    calls(torch.ones(2, 3))
    assert calls.graphs.replays == replays
    for _ in range(20):
        calls(torch.ones(2, 2))
    calls(torch.ones(2, 3)), calls(torch.ones(2, 3)), calls(torch.ones(2, 3))
    assert calls.graphs.replays == replays + 21 and calls.graphs.kept == 2  # in the place of the first one


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_graphs, "RECENT", 20)
    calls = Calls(add_one, Compilation(cudagraphs=True, cudagraph_max_gib=1e-9))
    calls.often(torch.ones(2, 3))
    assert calls.graphs.kept == 1 and calls.graphs.held > 1
    for _ in range(4):
        calls.often(torch.ones(2, 4))
    assert calls.graphs.kept == 1  # the first one was old enough at last
    assert (calls(torch.ones(2, 4))[0] == 3).all()


def test_forms_that_come_once_cost_nothing() -> None:
    calls = Calls(add_one)
    for i in range(2 * call_graphs.FORMS):
        calls(torch.ones(2, 3), float(i))
    assert not calls.graphs.kept and len(calls.graphs._seen) == call_graphs.FORMS


def test_what_a_device_refuses(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any, within: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    calls = Calls(add_one)
    monkeypatch.setattr(calls.graphs._recorder, "record", refuse)
    assert (calls.often(torch.ones(2, 4))[0] == 3).all() and not calls.graphs.kept
    assert (
        "graphs: transformer: a call runs as it is: operation not permitted when stream is capturing\n" in caplog.text
    )


def test_without_memory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Any, within: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    calls = Calls(add_one)
    calls.often(torch.ones(2, 3))
    monkeypatch.setattr(calls.graphs._recorder, "record", full)
    assert (calls.often(torch.ones(2, 4))[0] == 3).all()
    assert not calls.graphs.kept and caplog.text.count("no memory is left for them") == 1


def test_others_get_their_memory() -> None:
    """What does not fit is tried again without them."""
    engine = small_engine()
    pictures(engine, SIZES[:1])
    assert graphs_of(engine).kept
    vae = next(c for c in engine.components if c.name == "vae")
    entry, left = vae.entries["decode"], [1]

    def decode(latents: torch.Tensor) -> Any:
        if left and left.pop():
            raise torch.OutOfMemoryError("no")
        return entry.original(latents)

    vae.entries["decode"] = replace(entry, original=decode)
    engine.add(request_of("0"))
    pixels(outcome(engine)["0"])
    assert not left


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        recording = Recording(lambda given: given["x"] + 1, {"x": torch.ones(2)}, TapeRecorder())
        assert (recording.run({"x": torch.full((2,), 4.0)}) == 5).all()
        with pytest.raises(NotRecordable, match="in place"):
            Recording(lambda given: given["x"].add_(1), {"x": torch.ones(2)}, TapeRecorder())

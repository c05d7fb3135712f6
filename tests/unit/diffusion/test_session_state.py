"""What belongs to a session alone: torch's settings, random numbers, and what a pipeline stores on itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from session_bench import Bench, Double, ones

from polymux.diffusion.own_copy import own_copy
from polymux.diffusion.session import Session


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
    )


def interleaved(bench: Bench, body: Callable[[Any], Any]) -> list[Session]:
    """Two sessions of the same body, turn by turn; between the turns the settings are ours."""
    sessions = [bench.session(body) for _ in range(2)]
    before = settings()
    while not all(session.finished for session in sessions):
        for session in sessions:
            if session.ready:
                session.resume()
            assert settings() == before
        for session in sessions:
            bench.runner.execute(session.take_calls())
            assert settings() == before
    return sessions


def test_grad_mode_is_its_own(bench: Bench) -> None:
    def body(own: Any) -> list[Any]:
        seen = []
        with torch.no_grad():
            own.text_encoder(ones())
            seen.append(settings())
        with torch.enable_grad():
            own.text_encoder(ones())
            seen.append(settings())
        return seen

    for session in interleaved(bench, body):
        assert [seen[0] for seen in session.result] == [False, True]


def test_inference_mode_is_its_own(bench: Bench) -> None:
    """A pipeline whose call is decorated with it leaves it to nobody, however the sessions interleave."""

    def body(own: Any) -> list[Any]:
        seen = []
        with torch.inference_mode():
            for _ in range(3):
                out = own.text_encoder(ones())
                seen.append((settings()[:2], out.is_inference(), torch.ones(1).is_inference()))
        own.text_encoder(ones())
        seen.append((settings()[1], torch.ones(1).is_inference()))
        return seen

    for session in interleaved(bench, body):
        assert session.result == [((False, True), True, True)] * 3 + [(False, False)]


def test_in_inference_mode_nothing_is_deferred(bench: Bench) -> None:
    """There, a change of an argument in place would go unnoticed."""

    @torch.inference_mode()
    def body(own: Any) -> torch.Tensor:
        x = ones()
        own.transformer(x)
        first = own.transformer(x)
        x.add_(1)
        return first + own.transformer(x)

    session = bench.session(body)
    bench.finish(session)
    assert session.error is None and session.result.tolist() == [[6, 6]]


def dispatcher_works() -> bool:
    """Whether changes in place are counted and conjugates computed; neither is in an operation on a deferred tensor."""
    x = torch.zeros(1)
    before = x._version
    x.add_(1)
    return x._version > before and (torch.tensor([1 + 2j]).conj() * 1).imag.item() == -2


@pytest.mark.parametrize("end", ["finished", "cancelled"])
def test_the_dispatcher_is_everybody_s(bench: Bench, end: str) -> None:
    """A session waits in the middle of an operation; that must not show anywhere else."""
    seen: list[bool] = []
    bench.modules.transformer.watch = lambda: seen.append(dispatcher_works())

    def body(own: Any) -> bool:
        own.transformer(ones())
        for _ in range(3):
            first = own.transformer(ones())
            seen.append(dispatcher_works())
            first + own.transformer(ones())
            seen.append(dispatcher_works())
        return True

    sessions = [bench.session(body) for _ in range(3)]
    for _ in range(4):
        for session in sessions:
            if session.ready:
                session.resume()
            seen.append(dispatcher_works())
        for session in sessions:
            for call in session.take_calls():
                bench.runner.execute([call])
            seen.append(dispatcher_works())
    for session in sessions:
        while end == "finished" and not session.finished:
            bench.turn(session)
        session.cancel()
        seen.append(dispatcher_works())
    assert len(seen) > 40 and all(seen)


def test_autocast_and_the_default_type_are_its_own(bench: Bench) -> None:
    def body(own: Any) -> list[Any]:
        seen = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            own.text_encoder(ones())
            seen.append(settings()[2])
        torch.set_default_dtype(torch.float64)
        own.text_encoder(ones())
        seen.append(settings()[2:])
        return seen

    for session in interleaved(bench, body):
        assert session.result == [True, (False, torch.float64)]


def test_the_default_generator_is_its_own(bench: Bench) -> None:
    def body(own: Any) -> list[float]:
        numbers = []
        for _ in range(3):
            numbers.append(torch.rand(1).item())
            own.text_encoder(ones())
        return numbers

    before = torch.get_rng_state()
    sessions = [bench.session(body, seed) for seed in (1, 2, 1)]
    bench.finish(*sessions)
    wanted = [torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2, 1)]
    assert [session.result for session in sessions] == wanted
    assert torch.equal(torch.get_rng_state(), before)


class Pipeline:
    def __init__(self) -> None:
        self.transformer = Double()
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.spare = FlowMatchEulerDiscreteScheduler()
        self.guider = SimpleNamespace(step=0)
        self.history: list[int] = []
        self.memory = {"a": 1}


def test_schedulers_guiders_and_containers_are_its_own_and_weights_are_not() -> None:
    pipeline = Pipeline()
    own = own_copy(pipeline)
    own.scheduler.set_timesteps(3)
    own.spare.set_timesteps(3)
    own.guider.step = 5
    own.history.append(1)
    own.memory["a"] = 2
    own.height = 512
    assert len(pipeline.scheduler.timesteps) == len(pipeline.spare.timesteps) == 1000
    assert pipeline.guider.step == 0 and pipeline.history == [] and pipeline.memory == {"a": 1}
    assert not hasattr(pipeline, "height")
    assert own.transformer is pipeline.transformer

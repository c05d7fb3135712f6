"""A group of calls as one: what fails is retried smaller, and an error reaches only the call that has it alone."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_pipeline import MARKS, Denoiser
from greenlet import getcurrent

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component
from polymux.diffusion.merging import Merger
from polymux.diffusion.random_state import RandomState
from polymux.diffusion.runner import Runner
from polymux.diffusion.timing import Seconds
from polymux.errors import GenerationError, OutOfMemoryError

CPU = torch.device("cpu")
Forward = Callable[[torch.Tensor], Any]


class Owner(CallOwner):
    request_id = "a"

    def __init__(self, seed: int = 0) -> None:
        self.random = RandomState.seeded(CPU, seed)
        self.seconds: list[float] = []

    def spent(self, call: Call, seconds: Seconds, calls: int = 1, own: int = 1) -> None:
        self.seconds.append(seconds())


class Module(torch.nn.Module):
    """Runs a function and notes how many samples each call had."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function, self.batches = function, list[int]()

    def forward(self, x: torch.Tensor) -> Any:
        self.batches.append(len(x))
        return self.function(x)


def runner() -> Runner:
    return Runner(Merger(), CPU)


def calls_of(function: Forward, *values: float) -> tuple[list[Call], Module]:
    """One call of one sample for each value."""
    module = Module(function)
    component = Component("transformer", module, "denoiser")
    made = [
        Call(Owner(i), component, "forward", {"x": torch.full((1, 2), v)}, TorchState.now("cpu"))
        for i, v in enumerate(values)
    ]
    return made, module


def batches(run: Runner) -> dict[int, int]:
    """How many runs there were, by the number of calls that each answered."""
    (runs,) = run.log.read()
    assert (runs.component, runs.phase) == ("transformer", "denoise")
    assert sum(runs.seconds.counts) == sum(runs.batches.values())
    return runs.batches


def numbers(calls: list[Call]) -> list[Any]:
    """What each call has got: its number, or the kind of its error."""
    return [type(c.error).__name__ if c.error is not None else c.result[0, 0].item() for c in calls]


def denoiser_calls(limit: int, *marks: float) -> tuple[list[Call], Denoiser]:
    module = Denoiser(limit)
    component = Component("transformer", module, "denoiser")
    words = [torch.full((1, 1, 4), mark * 0.5) for mark in marks]
    state = TorchState.now("cpu")
    return [
        Call(
            Owner(),
            component,
            "forward",
            {"hidden_states": torch.full((1, 2, 4), float(i)), "timestep": torch.zeros(1), "encoder_hidden_states": w},
            state,
        )
        for i, w in enumerate(words)
    ], module


def test_a_group_runs_as_one() -> None:
    run, (calls, module) = runner(), calls_of(lambda x: x + 1, 1, 2, 3)
    run.execute(calls)
    assert module.batches == [3]
    assert numbers(calls) == [2, 3, 4]
    assert batches(run) == {3: 1}
    assert all(len(c.owner.seconds) == 1 for c in calls)  # type: ignore[attr-defined]


def test_a_run_costs_a_session_its_seconds_once() -> None:
    """However many of a session's guidance calls it answers."""
    run, (calls, _) = runner(), calls_of(lambda x: x + 1, 1, 2)
    calls[1].owner = calls[0].owner
    run.execute(calls)
    assert len(calls[0].owner.seconds) == 1  # type: ignore[attr-defined]


def test_nothing_to_run() -> None:
    runner().execute([])


# Memory.


def test_what_does_not_fit_together_runs_in_halves() -> None:
    run, (calls, module) = runner(), denoiser_calls(3, *[1.0] * 8)
    run.execute(calls)
    assert module.batches == [8, 4, 2, 2, 4, 2, 2]
    assert [c.result[0][0, 0, 0].item() for c in calls] == [i / 2 + 0.5 / 64 for i in range(8)]
    assert not run.unmergeable
    assert batches(run) == {2: 4}


def test_only_the_request_that_cannot_fit_fails() -> None:
    run, (calls, _) = runner(), denoiser_calls(3, 1.0, 1.0, MARKS["huge"], 1.0, 1.0)
    run.execute(calls)
    assert [c.error is None for c in calls] == [True, True, False, True, True]
    assert isinstance(calls[2].error, OutOfMemoryError)
    assert "transformer: this request alone does not fit" in calls[2].error.message
    assert not run.unmergeable


def test_one_request_that_cannot_fit_alone() -> None:
    run, (calls, module) = runner(), denoiser_calls(3, MARKS["huge"])
    run.execute(calls)
    assert module.batches == [1]
    assert isinstance(calls[0].error, OutOfMemoryError)


def test_the_cpu_s_allocator_counts_too() -> None:
    def full(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 12")
        return x

    run, (calls, _) = runner(), calls_of(full, 1, 2)
    run.execute(calls)
    assert numbers(calls) == [1, 2]
    assert not run.unmergeable, "next time there may be room"


def test_a_failed_attempt_holds_no_memory_while_its_parts_run() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def heavy(x: torch.Tensor) -> torch.Tensor:
        assert all(ref() is None for ref in held), "the activations of a failed attempt are still there"
        activations = torch.ones(1000)
        held.append(weakref.ref(activations))
        if len(x) > 1:
            try:
                raise torch.OutOfMemoryError("inner")
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError("outer") from error
        return x

    run, (calls, _) = runner(), calls_of(heavy, 1, 2, 3, 4)
    run.execute(calls)
    assert numbers(calls) == [1, 2, 3, 4] and len(held) == 7


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_an_error_that_is_kept_holds_no_memory(kind: type[Exception]) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def broken(x: torch.Tensor) -> torch.Tensor:
        activations = torch.ones(1000)
        held.append(weakref.ref(activations))
        raise kind("it broke")

    run, (calls, _) = runner(), calls_of(broken, 1)
    run.execute(calls)
    assert calls[0].error is not None and held[0]() is None


# Errors.


def test_an_error_in_one_member_reaches_it_alone() -> None:
    run, (calls, module) = runner(), denoiser_calls(64, 1.0, 1.0, 1.0, MARKS["boom"], 1.0)
    run.execute(calls)
    assert [type(c.error) for c in calls] == [type(None)] * 3 + [ValueError, type(None)]
    assert not run.unmergeable
    assert module.batches == [5, 2, 3, 1, 2, 1, 1]


def test_an_error_in_every_member() -> None:
    run, (calls, _) = runner(), denoiser_calls(64, *[MARKS["boom"]] * 3)
    run.execute(calls)
    assert numbers(calls) == ["ValueError"] * 3
    assert not run.unmergeable


def fails_in_company(x: torch.Tensor) -> torch.Tensor:
    if len(x) > 1:
        raise RuntimeError("sizes do not match")
    return x


@pytest.mark.parametrize("function", [fails_in_company, lambda x: x.sum(), lambda x: (x[:1], "text")])
def test_a_component_that_works_only_alone_is_remembered(function: Forward) -> None:
    run, (calls, module) = runner(), calls_of(function, 1, 2, 3)
    run.execute(calls)
    assert all(c.done and c.error is None for c in calls)
    assert module.batches == [3, 1, 2, 1, 1]
    assert run.unmergeable == {"transformer"}


def test_an_argument_that_was_changed_fails_its_call_alone() -> None:
    run, (calls, module) = runner(), calls_of(lambda x: x + 1, 1, 2, 3)
    for call in calls:
        call.keep_arguments()
    calls[1].arguments["x"].add_(1)
    run.execute(calls)
    assert numbers(calls) == [2, "GenerationError", 4]
    assert isinstance(calls[1].error, GenerationError) and "changed in place" in calls[1].error.message
    assert module.batches == [2]


def test_an_interrupt_is_nobody_s_error() -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    for values in ((1,), (1, 2)):
        run, (calls, _) = runner(), calls_of(interrupted, *values)
        with pytest.raises(KeyboardInterrupt):
            run.execute(calls)
        assert not any(c.done for c in calls)


# What holds while a call runs.


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
    )


def made_under_odd_settings(function: Forward) -> list[Call]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            return calls_of(function, 1, 2)[0]
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("broken", [True, False])
def test_a_call_runs_under_the_settings_it_was_made_under(together: bool, broken: bool) -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(settings())
        torch.set_grad_enabled(True)
        if broken:
            raise RuntimeError("it broke")
        return x

    calls = made_under_odd_settings(look)
    outside = settings()
    runner().execute(calls if together else calls[:1])
    assert set(seen) == {(False, True, True, torch.float16, torch.float64)}
    assert settings() == outside


def test_a_call_runs_in_the_runner_s_own_greenlet() -> None:
    seen = []
    calls, _ = calls_of(lambda x: (seen.append(getcurrent()), x)[1], 1, 2)
    runner().execute(calls)
    assert seen == [getcurrent()]


# Random numbers.


def test_a_component_draws_from_its_caller_s_generator() -> None:
    """One after the other, and each as if it had been alone; the process's own state is left as it was."""
    run, (calls, _) = runner(), calls_of(lambda x: x * 0 + torch.rand(len(x), 1), 1, 2, 3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    run.execute(calls)
    assert torch.equal(torch.get_rng_state(), before)
    alone = [torch.rand(1, 1, generator=torch.Generator().manual_seed(i)).item() for i in range(3)]
    assert numbers(calls) == alone
    assert run.unmergeable == {"transformer"}
    again = dataclasses.replace(calls[0], done=False)
    run.execute([again])
    source = torch.Generator().manual_seed(0)
    assert numbers([calls[0], again]) == torch.rand(2, generator=source).tolist()


def test_an_error_leaves_the_process_s_generator_as_it_was() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        raise RuntimeError("it broke")

    before = torch.get_rng_state()
    runner().execute(calls_of(broken, 1, 2)[0])
    assert torch.equal(torch.get_rng_state(), before)

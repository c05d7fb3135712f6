"""Python entry, orchestrator, process and engine together, with the embedded model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from polymux import AsyncOmni, Omni, OmniDiffusionSamplingParams, OmniRequestOutput
from polymux.config import stage_environment
from polymux.errors import CheckpointError, InvalidRequestError, RequestAbortedError

Wait = Callable[[Callable[[], bool]], None]


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni(model="demo", max_num_seqs=4, num_threads=1, max_inference_steps=10**6) as omni:
        yield omni


def small(**fields: Any) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(**{"height": 64, "width": 64, "num_inference_steps": 2, "seed": 1} | fields)


def pixels(output: OmniRequestOutput) -> list[np.ndarray]:
    assert output.error is None
    return [np.asarray(image) for image in output.images]


def same(one: np.ndarray, two: np.ndarray) -> bool:
    return one.shape == two.shape and int(np.abs(one.astype(int) - two.astype(int)).max()) <= 1


def test_seeds_say_which_picture(omni: Omni) -> None:
    outputs = omni.generate("a cat", small()) + omni.generate(["a cat"] * 3, [small(), small(seed=2), small(seed=None)])
    first, again, other, drawn = (pixels(output)[0] for output in outputs)
    assert first.shape == (64, 64, 3)
    assert same(first, again)
    assert not same(first, other)
    (seed,) = outputs[3].seeds
    assert seed is not None
    assert same(drawn, pixels(omni.generate("a cat", small(seed=seed))[0])[0])


def test_outputs_of_one_prompt_are_those_of_seed_plus_i(omni: Omni) -> None:
    (both,) = omni.generate("a cat", small(num_outputs_per_prompt=2))
    alone = omni.generate(["a cat", "a cat"], [small(seed=1), small(seed=2)])
    assert both.seeds == [1, 2]
    for one, other in zip(pixels(both), alone, strict=True):
        assert same(one, pixels(other)[0])


def test_a_generator_is_used_and_left_alone(omni: Omni) -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    (output,) = omni.generate("a cat", small(seed=None, generator=generator))
    assert same(pixels(output)[0], pixels(omni.generate("a cat", small())[0])[0])
    assert torch.equal(generator.get_state(), before)


def test_together_as_alone(omni: Omni) -> None:
    params = [small(seed=i, num_inference_steps=2 + i, width=64 + 32 * (i % 2)) for i in range(6)]
    alone = [omni.generate(f"prompt {i}", p)[0] for i, p in enumerate(params)]
    together = omni.generate([f"prompt {i}" for i in range(6)], params)
    for one, other in zip(alone, together, strict=True):
        assert same(pixels(one)[0], pixels(other)[0])
        assert other.metrics.steps == one.metrics.steps


def test_bad_requests_cost_nothing(omni: Omni) -> None:
    steps = [line for line in omni.metrics.render().splitlines() if line.startswith(b"polymux:denoise_steps_total")]
    wrong = [small(height=0), small(width=65), small(num_inference_steps=0), small(seed=2**64), small(strength=0.5)]
    outputs = omni.generate(["a"] * len(wrong), wrong)
    assert [type(output.error) for output in outputs] == [InvalidRequestError] * len(wrong)
    after = [line for line in omni.metrics.render().splitlines() if line.startswith(b"polymux:denoise_steps_total")]
    assert (after, len(steps)) == (steps, 1)


def test_progress_then_abort_then_the_next_one(omni: Omni, wait_until: Wait) -> None:
    async def scenario(under: AsyncOmni) -> list[tuple[int, int]]:
        steps = []
        with pytest.raises(RequestAbortedError):
            async for event in under.generate("a", small(num_inference_steps=10**5), request_id="long"):
                assert not isinstance(event, OmniRequestOutput)
                if event.phase == "denoise":
                    steps.append((event.step, event.total))
                if len(steps) == 3:
                    under.abort("long")
        return steps

    steps = omni._loop.call(asyncio.wait_for(scenario(omni._omni), 60))
    assert steps == sorted(steps)
    assert steps[-1][1] == 10**5
    assert omni.generate("a", small())[0].error is None
    wait_until(lambda: b'polymux:num_requests_running{model_name="demo"} 0.0' in omni.metrics.render())


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    def stages() -> int:
        return sum("polymux.engine.process" in child.cmdline() for child in psutil.Process().children())

    before = stages()
    with pytest.raises(CheckpointError):
        Omni(model=str(tmp_path))
    assert stages() == before


@pytest.mark.parametrize("delay", [0.3, 1.5, 3.0], ids="after {} s".format)
def test_a_parent_that_is_killed_while_its_model_loads(delay: float, wait_until: Wait) -> None:
    code = "from polymux import Omni; Omni(model='demo')"
    parent = subprocess.Popen([sys.executable, "-c", code], env=stage_environment(), stderr=subprocess.DEVNULL)
    process = psutil.Process(parent.pid)
    wait_until(lambda: len(process.children()) > 0)
    (stage,) = process.children()
    time.sleep(delay)  # somewhere in the imports, or in loading, or after it: it must not matter
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    wait_until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE)

"""What ran is counted at once, and timed when the device has finished it."""

from __future__ import annotations

import torch

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component
from polymux.diffusion.run_log import RunLog
from polymux.diffusion.timing import Elapsed
from polymux.metrics.catalog import RUN_S


class OnDevice(Elapsed):
    """A run that the device finishes when the test says so."""

    done = False

    @property
    def known(self) -> bool:
        return self.done


def call(name: str) -> Call:
    component = Component(name, torch.nn.Identity(), "denoiser")
    return Call(CallOwner(), component, "forward", {}, TorchState.now("cpu"))


def test_a_run_is_timed_when_it_is_finished_and_in_its_turn() -> None:
    log, slow, fast = RunLog(), OnDevice(0.02), Elapsed(1.0)
    log.add(call("unet"), 3, slow)
    log.add(call("unet"), 1, fast)
    (runs,) = log.read()
    assert (runs.component, runs.phase, runs.batches) == ("unet", "denoise", {3: 1, 1: 1})
    assert sum(runs.seconds.counts) == 0
    slow.done = True
    (runs,) = log.read()
    assert runs.seconds.sum == 1.02
    assert [RUN_S[i] for i, count in enumerate(runs.seconds.counts) if count] == [0.025, 1.0]


def test_longer_than_the_longest_bucket() -> None:
    log = RunLog()
    log.add(call("unet"), 1, Elapsed(RUN_S[-1] + 1))
    assert log.read()[0].seconds.counts[-1] == 1


def test_components_are_counted_apart() -> None:
    log = RunLog()
    for name in ("unet", "controlnet", "unet"):
        log.add(call(name), 2, Elapsed(0.0))
    assert {runs.component: runs.batches for runs in log.read()} == {"unet": {2: 2}, "controlnet": {2: 1}}

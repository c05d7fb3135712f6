"""Stages without a model: a real process with an engine that computes nothing; and logging left as it was."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from polymux.orchestrator.stage_client import ProcessStage

# The same examples in every run, and no stopwatch: the machine may do other things too.
settings.register_profile(
    "polymux", derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("polymux")

FAKE_STAGE = (sys.executable, "-P", str(Path(__file__).parent / "orchestrator" / "fake_stage.py"))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that runs in the process of the tests sets up logging for it."""
    loggers = (logging.getLogger(), logging.getLogger("polymux"))
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def make_stage() -> Callable[[], ProcessStage]:
    """Makes clients of stages that behave as `orchestrator/fake_stage.py` says."""
    return lambda: ProcessStage(FAKE_STAGE)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for something that must become true; fails after ten seconds."""

    def wait(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not true():
            assert time.monotonic() < end, "it did not become true"
            time.sleep(0.01)

    return wait

"""What the engines of transformers' models have in common: a session is the model's own loop, as a coroutine of calls
of its modules, which are interleaved with those of other requests.

Knows neither what a session is to make nor what becomes of it.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.merging import Merger
from polymux.diffusion.runner import Runner
from polymux.diffusion.session import Session
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import GenerateModel
from polymux.engine.session_engine import AnyJob, SessionEngine, prepare_device
from polymux.families.generate import Parts
from polymux.request import Capabilities, Progress

IDLE_S = 0.002  # for messages, while what is made waits to be used up
PULSE_S = 5.0  # silence for much longer would be taken for a stage that hangs


class TransformersEngine(SessionEngine[AnyJob, GenerateModel]):
    """Implements most of `engine.base.StageEngine`."""

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Load the model. Raises CheckpointError, ConfigError."""
        device = prepare_device(config)
        return cls(config, GenerateModel.load(config, device), device)

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, device, model, self._describe(model, config), collect=False)
        self._said_at = time.monotonic()
        merger = Merger()
        self._run_with(merger, Runner(merger, device))

    def _run_with(self, merger: Merger, runner: Runner) -> None:
        self.runner = runner
        tokens = self.config.scheduler.max_batched_tokens
        self.scheduler = StepScheduler(tokens, self._may_merge, merger.key, merger.tokens)

    def _may_merge(self, call: Call) -> bool:
        return False  # each has a cache of its own

    @abstractmethod
    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        """What it takes and makes."""

    @abstractmethod
    def _done(self, job: AnyJob, session: Session, result: Any) -> None:
        """A session has ended, with this."""

    def _load_again(self) -> GenerateModel:
        return GenerateModel.load(self.config, self.device)

    def _new_session(self, job: AnyJob) -> Session:
        """The job's next one; `_start` has it run."""
        seed = job.randomness[job.opened].seed
        assert seed is not None
        return Session(job.request.request_id, job.opened, seed, self.settings)

    def _start(self, job: AnyJob, session: Session, run: Callable[[Parts], Any]) -> None:
        """`run` gets a copy of the model that is the session's own; what it returns is the session's result."""
        model = self.loaded
        session.open(model.parts, lambda _: run(model.own()))
        job.opened += 1
        job.started = job.started or time.perf_counter()
        job.sessions[session.index] = session

    def _advance(self, session: Session) -> None:
        """Run a session until it waits for a call or has ended."""
        while session.ready:
            session.resume()
            self.scheduler.submit(session.take_calls())
        job = self.jobs.get(session.request_id)
        if not session.finished or job is None:  # none: another part of the request has failed, and ended it
            return
        if session.error is not None:
            self._fail(job, as_polymux_error(session.error, session.where, computing=session.computing))
            return
        result, session.result = session.result, None
        self._close(job, session)
        self._done(job, session, result)

    def _pulse(self, jobs: Iterable[AnyJob]) -> None:
        """Nothing is there to be said; now and then, say that these are under way."""
        if time.monotonic() - self._said_at > PULSE_S:
            self._said_at = time.monotonic()
            self.events += [Progress(job.request.request_id, "decode", job.steps_done, 0) for job in jobs]

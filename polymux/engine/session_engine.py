"""What the engines have in common: requests as jobs, jobs as sessions, and the queue of their calls.

A step: let every session that can go on run until it needs a component, choose the calls to run, run them as one.
Knows neither what a session runs nor what becomes of its result, and nothing of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.component import Component
from polymux.diffusion.runner import Runner
from polymux.diffusion.session import ResultSpecs, Session, SessionSettings
from polymux.diffusion.step_scheduler import Scheduler
from polymux.engine.device import resolve_device
from polymux.engine.job import Job
from polymux.errors import NotReadyError, OutOfMemoryError, PolymuxError, RequestAbortedError
from polymux.memory.measure import device_bytes, release, resident_bytes, used_bytes
from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Failed, Request, StageStats
from polymux.validation import refuse, validate


class LoadedModel(Protocol):
    """A model that can be lent away."""

    @property
    def components(self) -> tuple[Component, ...]: ...

    def sleep(self) -> None:
        """Move everything to the host. Raises ConfigError, with everything in place, if it cannot."""
        ...

    def wake(self, device: torch.device) -> None: ...

    def close(self) -> None: ...


AnyJob = TypeVar("AnyJob", bound=Job)
AnyModel = TypeVar("AnyModel", bound=LoadedModel)


class SessionEngine(ABC, Generic[AnyJob, AnyModel]):
    """Implements most of `engine.base.StageEngine`."""

    runner: Runner
    scheduler: Scheduler

    def __init__(
        self, config: EngineConfig, device: torch.device, model: AnyModel, described: Capabilities, collect: bool
    ) -> None:
        """`collect`: the guidance calls of a step may run together."""
        self.config, self.device, self.described = config, device, described
        self.model: AnyModel | None = model
        self.asleep = 0  # the level
        self.max_sessions = config.scheduler.max_num_seqs
        self.settings = SessionSettings(device, ResultSpecs(), collect, model.components)
        self.jobs: dict[str, AnyJob] = {}
        self.events: list[Event] = []
        self.totals = {"steps": 0.0, "encode": 0.0, "denoise": 0.0, "decode": 0.0}  # of sessions that have ended

    @property
    def loaded(self) -> AnyModel:
        """The model. Raises NotReadyError while there is none."""
        if self.model is None:
            raise NotReadyError("the model is asleep, and its weights are dropped")
        return self.model

    @property
    def capabilities(self) -> Capabilities:
        return self.described

    @property
    def stats(self) -> StageStats:
        running = sum(job.opened > 0 for job in self.jobs.values())
        open_steps = sum(s.steps.done for job in self.jobs.values() for s in job.sessions.values())
        return StageStats(
            running=running,
            waiting=len(self.jobs) - running,
            steps=int(self.totals["steps"]) + open_steps,
            seconds={phase: seconds for phase, seconds in self.totals.items() if phase != "steps"},
            runs=self.runner.log.read(),
            device_memory=device_bytes(self.device),
            host_memory=resident_bytes(),
        )

    @property
    def busy(self) -> bool:
        return bool(self.jobs or self.events)

    @property
    def working(self) -> bool:
        """Whether a session is open, or is to be opened."""
        return any(job.hungry or job.sessions or job.previews for job in self.jobs.values())

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError; then the engine holds nothing of it."""
        if self.asleep:
            raise NotReadyError("the model is asleep")
        validate(request, self.described, self.config.limits)
        if request.request_id in self.jobs:
            raise refuse("request_id", request.request_id, "a request of this id is in flight")
        self.jobs[request.request_id] = self._job_of(request)

    def abort(self, request_id: str) -> None:
        if request_id in self.jobs:
            self._fail(self.jobs[request_id], RequestAbortedError("the request was aborted"))

    def taken(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is not None and job.under_way:
            job.under_way -= 1

    def feed(self, chunk: Chunk) -> None:
        raise TypeError("this stage is the first one: there is none before it")

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Event]:
        self._admit()
        for session in [s for job in self.jobs.values() for s in (*job.previews.values(), *job.sessions.values())]:
            self._advance(session)
        group = self.scheduler.next_group()
        try:
            self._execute(group)
        finally:
            self.scheduler.submit(self._unanswered(group))
        self._deliver(idle=not group)
        for job in self.jobs.values():
            self._report(job)
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        for job in list(self.jobs.values()):
            self._fail(job, RequestAbortedError("the engine was closed"))
        self._stop()
        if self.model is not None:
            self.model.close()

    # Sleep: level 1 moves the weights to the host, level 2 drops the model and loads it again.

    def sleep(self, level: int) -> int:
        """Give the device's memory back; the bytes that others have of it. Only when the engine is not busy.

        Raises ConfigError, with everything in place, if the weights cannot be moved.
        """
        if self.busy or self.asleep:
            raise NotReadyError("the engine is busy" if self.busy else f"the engine sleeps, at level {self.asleep}")
        before = used_bytes(self.device)
        if level == 1:
            self.loaded.sleep()
        else:
            self.loaded.close()
            self.model = None
            self._use(())
        self.asleep = level
        release(self.device)
        return max(before - used_bytes(self.device), 0)

    def wake_up(self) -> None:
        """The opposite of `sleep`. Raises what loading raises, and OutOfMemoryError; then it sleeps on."""
        try:
            if self.asleep == 1:
                self.loaded.wake(self.device)
            elif self.asleep == 2:
                self.model = self._load_again()
                self._use(self.model.components)
        except torch.OutOfMemoryError as error:
            release(self.device)
            raise OutOfMemoryError(f"there is no room to wake up: {error}") from None
        self.asleep = 0

    # What an engine does in its own way.

    @abstractmethod
    def _job_of(self, request: Request) -> AnyJob:
        """What is to be done for a valid request. Raises InvalidRequestError; then nothing is held of it."""

    @abstractmethod
    def _open(self, job: AnyJob) -> None:
        """Open the job's next session."""

    @abstractmethod
    def _advance(self, session: Session) -> None:
        """Run a session until it waits for a call or has ended."""

    @abstractmethod
    def _deliver(self, idle: bool) -> None:
        """Hand out what is made. `idle`: there was nothing to run."""

    @abstractmethod
    def _load_again(self) -> AnyModel:
        """After its weights were dropped."""

    def _stop(self) -> None:
        """End what works beside the steps; the model is closed after it."""
        return None

    def _use(self, components: Sequence[Component]) -> None:
        """The model has come back, with these components, or is gone, with none."""
        self.settings = replace(self.settings, components=components)

    def _execute(self, group: list[Call]) -> None:
        """Run the calls; afterwards each has a result or an error."""
        self.runner.execute(group)

    def _unanswered(self, group: list[Call]) -> list[Call]:
        """The calls of a group that are to run yet: an interrupt loses nobody's call."""
        return [call for call in group if not call.done]

    def _forget(self, session: Session) -> None:
        """A session ends: its calls are not to run any more."""
        self.scheduler.forget(session)

    # The life of a job: admitted (its sessions are opened), run, ended.

    def _admit(self) -> None:
        """Open sessions while there is room: of the request with the fewest open ones first, then of the oldest."""
        free = self.max_sessions - sum(len(job.sessions) for job in self.jobs.values())
        for _ in range(free):
            hungry = [job for job in self.jobs.values() if job.hungry]
            if hungry:
                self._open(min(hungry, key=lambda job: (len(job.sessions), job.arrived)))

    def _close(self, job: AnyJob, session: Session) -> None:
        self._forget(session)
        session.cancel()
        steps, spent = job.steps_done, dict(job.seconds)
        job.close(session)
        self.totals["steps"] += job.steps_done - steps
        for phase, seconds in job.seconds.items():
            self.totals[phase] += seconds - spent.get(phase, 0.0)

    def _report(self, job: AnyJob) -> None:
        progress = job.progress()
        if progress is not None:
            self.events.append(progress)

    def _fail(self, job: AnyJob, error: PolymuxError) -> None:
        del self.jobs[job.request.request_id]
        for session in list(job.sessions.values()):
            self._close(job, session)
        job.drop()
        self.events.append(Failed(job.request.request_id, error.info()))


def prepare_device(config: EngineConfig) -> torch.device:
    """The device that the configuration means, and torch's threads as it says. Raises ConfigError."""
    if config.device.num_threads is not None:
        torch.set_num_threads(config.device.num_threads)
    return resolve_device(config.device.device)

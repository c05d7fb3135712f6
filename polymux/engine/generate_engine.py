"""The engine of a stage that makes sound with a model of transformers.

Each sentence of a request runs the model's own `generate` (or its forward) as a coroutine of calls of its modules. A
step: let every session that can go on run until it needs a module, run the call that has waited longest. Calls are
interleaved, not merged. Knows requests and the queue between them; not what a model computes, and nothing of processes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.diffusion.merging import Merger
from polymux.diffusion.outputs import finite_array
from polymux.diffusion.runner import Runner
from polymux.diffusion.session import ResultSpecs, Session, SessionSettings
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.device import resolve_device
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Randomness, seed_of
from polymux.engine.sound_job import SoundJob, StepTap
from polymux.errors import (
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OutOfMemoryError,
    PolymuxError,
    RequestAbortedError,
    from_info,
)
from polymux.families.generate import Parts, Wish
from polymux.media.tempo import stretch
from polymux.media.wire import Array, to_wire
from polymux.memory.measure import device_bytes, release, resident_bytes, used_bytes
from polymux.request import ArrayData, Capabilities, Event, Failed, Progress, Request, SoundPiece, StageStats
from polymux.sampling import sampling_of
from polymux.validation import validate

IDLE_S = 0.002  # for messages, while finished sound waits to be used up
PULSE_S = 5.0  # silence for much longer would be taken for a stage that hangs


class GenerateEngine:
    """Implements `engine.base.StageEngine` for the declared models of transformers."""

    @classmethod
    def load(cls, config: EngineConfig) -> GenerateEngine:
        """Load the model. Raises CheckpointError, ConfigError."""
        device = resolve_device(config.device.device)
        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)
        return cls(config, GenerateModel.load(config, device), device)

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        self.config, self.device = config, device
        self.asleep = 0  # the level
        self.model: GenerateModel | None = model
        self.family, self.described = model.family, model.describe(config)
        merger = Merger((), ())
        self.runner = Runner(merger, device)
        self.scheduler = StepScheduler(
            config.scheduler.max_batched_tokens, lambda call: False, merger.key, merger.tokens
        )
        self.settings = SessionSettings(device, ResultSpecs(), False, model.components)
        self.jobs: dict[str, SoundJob] = {}
        self.events: list[Event] = []
        self._said_at = time.monotonic()
        self.totals = {"steps": 0.0, "encode": 0.0, "denoise": 0.0, "decode": 0.0}  # of sessions that have ended

    @property
    def loaded(self) -> GenerateModel:
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

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError; then the engine holds nothing of it."""
        if self.asleep:
            raise NotReadyError("the model is asleep")
        validate(request, self.described, self.config.limits)
        if request.request_id in self.jobs:
            what = f"request_id={request.request_id!r}: a request of this id is in flight"
            raise InvalidRequestError(what, param="request_id")
        params, parts, adapter = sampling_of(request, self.described), self.loaded.parts, self.family.adapter
        voice = params.voice or next(iter(self.described.voices), None)
        texts = adapter.pieces(request.prompt or "", params.voice, self.family.longest)
        if not texts:
            raise InvalidRequestError("prompt: there is nothing in it to speak", param="prompt")
        calls = [adapter.prepare(parts, Wish(text=text, params=params, voice=voice)) for text in texts]
        seed = seed_of(params.seed)
        randomness = [Randomness(seed, torch.Generator().manual_seed(seed))] * len(calls)
        self.jobs[request.request_id] = SoundJob(request, randomness, params=params, calls=calls)

    def abort(self, request_id: str) -> None:
        if request_id in self.jobs:
            self._fail(self.jobs[request_id], RequestAbortedError("the request was aborted"))

    def taken(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is not None and job.under_way:
            job.under_way -= 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Event]:
        self._admit()
        for session in [s for job in self.jobs.values() for s in job.sessions.values()]:
            self._advance(session)
        group = self.scheduler.next_group()
        try:
            self.runner.execute(group)
        finally:
            self.scheduler.submit(call for call in group if not call.done)  # an interrupt loses nobody's call
        for job in list(self.jobs.values()):
            self.events += job.pieces()
            self._report(job)
            if job.complete:
                del self.jobs[job.request.request_id]
                self.events.append(job.finished(self.family.modality, None, self.described.sample_rate))
        if not group and not self.events and self.jobs:
            self._idle()
        events, self.events = self.events, []
        return events

    def warm_up(self) -> None:
        """Make one small generation. Raises what it raised."""
        text = self.family.adapter.sample_text(self.loaded.parts)
        self.add(Request(request_id="warm-up", prompt=text, sampling=self.family.warmup))
        while self.busy:
            for event in self.step():
                if isinstance(event, Failed):
                    raise from_info(event.error)
                if isinstance(event, SoundPiece):
                    self.taken(event.request_id)

    def close(self) -> None:
        for job in list(self.jobs.values()):
            self._fail(job, RequestAbortedError("the engine was closed"))
        if self.model is not None:
            self.model.close()

    # Sleep: level 1 moves the weights to the host, level 2 drops the model and loads it again.

    def sleep(self, level: int) -> int:
        """Give the device's memory back; the bytes that others have of it. Only when the engine is not busy."""
        if self.busy or self.asleep:
            raise NotReadyError("the engine is busy" if self.busy else f"the engine sleeps, at level {self.asleep}")
        before = used_bytes(self.device)
        if level == 1:
            self.loaded.weights.sleep()
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
                self.loaded.weights.wake()
            elif self.asleep == 2:
                self.model = GenerateModel.load(self.config, self.device)
                self._use(self.model.components)
        except torch.OutOfMemoryError as error:
            release(self.device)
            raise OutOfMemoryError(f"there is no room to wake up: {error}") from None
        self.asleep = 0

    def _use(self, components: Any) -> None:
        self.settings = SessionSettings(self.device, ResultSpecs(), False, components)

    # The life of a job: admitted (its sessions are opened), run, ended.

    def _admit(self) -> None:
        """Open sessions while there is room: of the request with the fewest open ones first, then of the oldest."""
        free = self.config.scheduler.max_num_seqs - sum(len(job.sessions) for job in self.jobs.values())
        for _ in range(free):
            hungry = [job for job in self.jobs.values() if job.hungry]
            if hungry:
                self._open(min(hungry, key=lambda job: (len(job.sessions), job.arrived)))

    def _open(self, job: SoundJob) -> None:
        index, model = job.opened, self.loaded
        seed = job.randomness[index].seed
        assert seed is not None
        session = Session(job.request.request_id, index, seed, self.settings)
        session.tap = StepTap(self.family.steps, session.steps)
        call = job.calls[index]
        if call.steps is not None and not call.ends:
            session.steps.total = call.steps

        def run(_: Parts) -> Array:
            sound = self.family.adapter.run(model.own(), call)
            return _sound_of(sound, model.family.adapter.sample_rate(model.parts), job.params.speed)

        session.open(model.parts, run)
        job.opened += 1
        job.started = job.started or time.perf_counter()
        job.sessions[index] = session

    def _advance(self, session: Session) -> None:
        """Run a session until it waits for a call or has ended."""
        while session.ready:
            session.resume()
            self.scheduler.submit(session.take_calls())
        if session.finished and session.request_id in self.jobs:  # else another sentence has failed, and ended it
            self._ended(self.jobs[session.request_id], session)

    def _ended(self, job: SoundJob, session: Session) -> None:
        if session.error is not None:
            self._fail(job, as_polymux_error(session.error, session.where, computing=session.computing))
            return
        call, sound = job.calls[session.index], session.result
        self._close(job, session)
        if call.ends and call.steps is not None and session.steps.done >= call.steps:
            what = f"sentence {session.index + 1} had not come to its end after {call.steps} steps"
            self._fail(job, GenerationError(f"{what}: another seed may, and max_new_tokens accepts it as it is"))
            return
        rate = self.described.sample_rate or 0
        job.seconds_made += sound.shape[1] / rate
        job.made[session.index] = _parts_of(sound, rate, self.config.process.output_chunk_bytes)

    def _idle(self) -> None:
        """All that there is to do is to wait until clients have used up what they have."""
        time.sleep(IDLE_S)
        if time.monotonic() - self._said_at > PULSE_S:
            self._said_at = time.monotonic()
            self.events += [Progress(name, "decode", job.steps_done, 0) for name, job in self.jobs.items()]

    def _close(self, job: SoundJob, session: Session) -> None:
        self.scheduler.forget(session)
        session.cancel()
        before = dict(job.seconds)
        job.close(session)
        session.result = None
        self.totals["steps"] += session.steps.done
        for phase, seconds in job.seconds.items():
            self.totals[phase] += seconds - before.get(phase, 0.0)

    def _report(self, job: SoundJob) -> None:
        progress = job.progress()
        if progress is not None:
            self.events.append(progress)

    def _fail(self, job: SoundJob, error: PolymuxError) -> None:
        del self.jobs[job.request.request_id]
        for session in list(job.sessions.values()):
            self._close(job, session)
        self.events.append(Failed(job.request.request_id, error.info()))


def _sound_of(sound: Any, sample_rate: int, speed: float | None) -> Array:
    """What a model returned as (channels, samples) on the host, at the pace that was asked for."""
    samples = finite_array(sound)
    samples = samples[np.newaxis] if samples.ndim == 1 else samples
    if samples.ndim != 2:
        raise GenerationError(f"the model returned sound of shape {samples.shape}")
    return samples if speed in (None, 1.0) else stretch(samples, sample_rate, float(speed or 1.0))


def _parts_of(sound: Array, sample_rate: int, chunk_bytes: int) -> deque[ArrayData]:
    """In messages of bounded size; at least one."""
    count = max(1, chunk_bytes // (sound.itemsize * len(sound)))
    parts = [to_wire(sound[:, i : i + count], sample_rate) for i in range(0, max(sound.shape[1], 1), count)]
    return deque(part for part in parts if isinstance(part, ArrayData))

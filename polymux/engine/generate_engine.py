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
from polymux.diffusion.session import Session
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Randomness
from polymux.engine.reference import reference_of
from polymux.engine.seeds import seed_of
from polymux.engine.session_engine import SessionEngine, prepare_device
from polymux.engine.sound_job import SoundJob, StepTap
from polymux.engine.warmup import run_first_that_works
from polymux.errors import (
    GenerationError,
    InvalidRequestError,
)
from polymux.families.generate import Parts, Wish
from polymux.media.tempo import stretch
from polymux.media.wire import Array, to_wire
from polymux.request import ArrayData, Progress, Request
from polymux.sampling import sampling_of

IDLE_S = 0.002  # for messages, while finished sound waits to be used up
PULSE_S = 5.0  # silence for much longer would be taken for a stage that hangs


class GenerateEngine(SessionEngine[SoundJob, GenerateModel]):
    """Implements `engine.base.StageEngine` for the declared models of transformers."""

    @classmethod
    def load(cls, config: EngineConfig) -> GenerateEngine:
        """Load the model. Raises CheckpointError, ConfigError."""
        device = prepare_device(config)
        return cls(config, GenerateModel.load(config, device), device)

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, device, model, model.describe(config), collect=False)
        self.family = model.family
        merger = Merger((), ())
        self.runner = Runner(merger, device)
        self.scheduler = StepScheduler(
            config.scheduler.max_batched_tokens, lambda call: False, merger.key, merger.tokens
        )
        self._said_at = time.monotonic()

    def _job_of(self, request: Request) -> SoundJob:
        params, parts, adapter = sampling_of(request, self.described), self.loaded.parts, self.family.adapter
        voice = params.voice or next(iter(self.described.voices), None)
        texts = adapter.pieces(request.prompt or "", params.voice, self.family.longest)
        if not texts:
            raise InvalidRequestError("prompt: there is nothing in it to speak", param="prompt")
        reference = reference_of(request, params, adapter.sample_rate(parts))
        wishes = [Wish(text=text, params=params, voice=voice, reference=reference) for text in texts]
        calls = [adapter.prepare(parts, wish) for wish in wishes]
        seed = seed_of(params.seed)
        randomness = [Randomness(seed, torch.Generator().manual_seed(seed))] * len(calls)
        return SoundJob(request, randomness, params=params, calls=calls)

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            self.events += job.pieces()
            self._report(job)
            if job.complete:
                del self.jobs[job.request.request_id]
                self.events.append(job.finished(self.family.modality, None, self.described.sample_rate))
        if idle and not self.events and self.jobs:
            self._idle()

    def warm_up(self) -> None:
        """Make one small generation. Raises what it raised."""
        text = self.family.adapter.sample_text(self.loaded.parts)
        run_first_that_works(self, [Request(request_id="warm-up", prompt=text, sampling=self.family.warmup)])

    def _load_again(self) -> GenerateModel:
        return GenerateModel.load(self.config, self.device)

    def _open(self, job: SoundJob) -> None:
        index, model = job.opened, self.loaded
        seed = job.randomness[index].seed
        assert seed is not None
        session = Session(job.request.request_id, index, seed, self.settings)
        session.tap = StepTap(self.family.steps, session.steps)
        call = job.calls[index]
        if call.steps is not None and not call.ends:
            session.steps.total = call.steps

        session.open(model.parts, lambda _: self._run(job, index, model.own()))
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
        call, result = job.calls[session.index], session.result
        self._close(job, session)
        if call.ends and call.steps is not None and session.steps.done >= call.steps:
            what = f"sentence {session.index + 1} had not come to its end after {call.steps} steps"
            more = ", and max_new_tokens accepts it as it is" if "max_new_tokens" in self.family.arguments else ""
            self._fail(job, GenerationError(f"{what}: another seed may{more}"))
            return
        self._made(job, session.index, result)

    def _run(self, job: SoundJob, index: int, own: Parts) -> Any:
        """In a session: make the sound of a sentence."""
        sound = self.family.adapter.run(own, job.calls[index])
        return sound_of(sound, self.family.adapter.sample_rate(own), job.params.speed)

    def _made(self, job: SoundJob, index: int, result: Any) -> None:
        """A session has ended with this."""
        rate = self.described.sample_rate or 0
        job.seconds_made += result.shape[1] / rate
        job.made[index] = parts_of(result, rate, self.config.process.output_chunk_bytes)

    def _idle(self) -> None:
        """All that there is to do is to wait until clients have used up what they have."""
        time.sleep(IDLE_S)
        if time.monotonic() - self._said_at > PULSE_S:
            self._said_at = time.monotonic()
            self.events += [Progress(name, "decode", job.steps_done, 0) for name, job in self.jobs.items()]

    def _close(self, job: SoundJob, session: Session) -> None:
        super()._close(job, session)
        session.result = None


def sound_of(sound: Any, sample_rate: int, speed: float | None = None) -> Array:
    """What a model returned as (channels, samples) on the host, at the pace that was asked for."""
    samples = finite_array(sound)
    samples = samples[np.newaxis] if samples.ndim == 1 else samples
    if samples.ndim != 2:
        raise GenerationError(f"the model returned sound of shape {samples.shape}")
    return samples if speed in (None, 1.0) else stretch(samples, sample_rate, float(speed or 1.0))


def parts_of(sound: Array, sample_rate: int, chunk_bytes: int) -> deque[ArrayData]:
    """In messages of bounded size; at least one."""
    count = max(1, chunk_bytes // (sound.itemsize * len(sound)))
    parts = [to_wire(sound[:, i : i + count], sample_rate) for i in range(0, max(sound.shape[1], 1), count)]
    return deque(part for part in parts if isinstance(part, ArrayData))

"""The engine of a stage that makes sound with a model of transformers.

Each sentence of a request runs the model's own `generate` (or its forward) as a coroutine of calls of its modules. A
step: let every session that can go on run until it needs a module, run the call that has waited longest. Calls are
interleaved, and merged where the family and the operator say so. A sentence may be heard while it is made. Knows
requests and the queue between them; not what a model computes, and nothing of processes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.outputs import finite_array
from polymux.diffusion.session import Session
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Randomness
from polymux.engine.reference import reference_of
from polymux.engine.seeds import seed_of
from polymux.engine.sound_job import SoundJob, StepTap
from polymux.engine.transformers_engine import IDLE_S, TransformersEngine
from polymux.engine.warmup import run_first_that_works
from polymux.errors import (
    GenerationError,
    InvalidRequestError,
    UnusableOutputError,
)
from polymux.families.generate import Parts, Wish
from polymux.media.tempo import stretch
from polymux.media.wire import Array, to_wire
from polymux.request import ArrayData, Capabilities, Request
from polymux.sampling import sampling_of


class GenerateEngine(TransformersEngine[SoundJob]):
    """Implements `engine.base.StageEngine` for the declared models of transformers."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.family = model.family

    def _may_merge(self, call: Call) -> bool:
        return (
            self.config.scheduler.merge_decoding
            and call.component.role in self.family.merge
            and call.method != "encode"
            and self.runner.may_merge(call.component.name)
        )

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        return model.describe(config)

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
        adapter, parts = self.family.adapter, self.loaded.parts
        sampling = adapter.warmed(parts, self.family.warmup)
        run_first_that_works(
            self, [Request(request_id="warm-up", prompt=adapter.sample_text(parts), sampling=sampling)]
        )

    def _open(self, job: SoundJob) -> None:
        index, session = job.opened, self._new_session(job)
        session.tap = StepTap(self.family.steps, session.steps)
        call = job.calls[index]
        if call.steps is not None and not call.ends:
            session.steps.total = call.steps
        self._start(job, session, lambda own: self._run(job, index, own))

    def _done(self, job: SoundJob, session: Session, result: Any) -> None:
        if not self._cut_off(job, session.index, session.steps.done):
            self._made(job, session.index, result)

    def _cut_off(self, job: SoundJob, index: int, steps: int) -> bool:
        """Whether a sentence has ended after so many steps without having come to its end; then the job has failed."""
        call = job.calls[index]
        if not call.ends or call.steps is None or steps < call.steps:
            return False
        what = f"sentence {index + 1} had not come to its end after {call.steps} steps"
        more = ", and max_new_tokens accepts it as it is" if "max_new_tokens" in self.family.arguments else ""
        self._fail(job, UnusableOutputError(f"{what}: another seed may{more}"))
        return True

    def _run(self, job: SoundJob, index: int, own: Parts) -> Any:
        """In a session: make the sound of a sentence. What is not to be stretched is heard as it is made."""
        speed, made = job.params.speed, []
        for sound in self.family.adapter.speak(own, job.calls[index]):
            part = sound_of(sound)
            if speed in (None, 1.0):
                self._hear(job, index, part)
            else:
                made.append(part)
        if made:
            rate = self.family.adapter.sample_rate(own)
            self._hear(job, index, stretch(np.concatenate(made, axis=1), rate, float(speed or 1.0)))

    def _hear(self, job: SoundJob, index: int, sound: Array) -> None:
        """The next part of a sentence's sound."""
        rate = self.described.sample_rate or 0
        job.seconds_made += sound.shape[1] / rate
        parts = parts_of(sound, rate, self.config.process.output_chunk_bytes)
        job.made.setdefault(index, deque()).extend(parts)

    def _made(self, job: SoundJob, index: int, result: Any) -> None:
        """A sentence is made to its end."""
        job.whole.add(index)

    def _idle(self) -> None:
        """All that there is to do is to wait until clients have used up what they have."""
        time.sleep(IDLE_S)
        self._pulse(self.jobs.values())


def sound_of(sound: Any) -> Array:
    """What a model returned as (channels, samples) on the host."""
    samples = finite_array(sound)
    samples = samples[np.newaxis] if samples.ndim == 1 else samples
    if samples.ndim != 2:
        raise GenerationError(f"the model returned sound of shape {samples.shape}")
    return samples


def parts_of(sound: Array, sample_rate: int, chunk_bytes: int) -> deque[ArrayData]:
    """In messages of bounded size; at least one."""
    count = max(1, chunk_bytes // (sound.itemsize * len(sound)))
    parts = [to_wire(sound[:, i : i + count], sample_rate) for i in range(0, max(sound.shape[1], 1), count)]
    return deque(part for part in parts if isinstance(part, ArrayData))

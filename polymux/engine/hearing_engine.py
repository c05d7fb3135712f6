"""The engine of a stage that writes down what is said in a sound, with a model of transformers.

As the engine of those that speak: the model's own `generate` is a coroutine of calls of its modules, interleaved with
those of other requests. A request is one session; its text comes when it is complete.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.diffusion.merging import Merger
from polymux.diffusion.runner import Runner
from polymux.diffusion.session import Session
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Job, Randomness
from polymux.engine.reference import mono_of
from polymux.engine.seeds import seed_of
from polymux.engine.session_engine import SessionEngine, prepare_device
from polymux.engine.sound_job import StepTap
from polymux.engine.warmup import run_first_that_works
from polymux.families.generate import Call, Parts
from polymux.families.hearing import Heard, HearingAdapter, HearingFamily, Transcript
from polymux.media.wire import to_wire
from polymux.request import ArrayData, Capabilities, Finished, Modality, Request, RequestMetrics
from polymux.sampling import HEARD, sampling_of

_WARM_UP_S = 1.0


@dataclass(eq=False)
class HearingJob(Job):
    call: Call | None = None
    transcript: Transcript | None = None

    def metrics(self) -> RequestMetrics:
        tokens = 0 if self.transcript is None else self.transcript.tokens
        return msgspec.structs.replace(super().metrics(), completion_tokens=tokens)

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        assert self.transcript is not None
        return Finished(
            request_id=self.request.request_id,
            modality=modality,
            outputs=[[]],
            seeds=[self.randomness[0].seed],
            metrics=self.metrics(),
            text=self.transcript.text,
            finish_reason="stop",
            segments=self.transcript.segments,
            language=self.transcript.language,
        )


class HearingEngine(SessionEngine[HearingJob, GenerateModel]):
    """Implements `engine.base.StageEngine`."""

    @classmethod
    def load(cls, config: EngineConfig) -> HearingEngine:
        """Load the model. Raises CheckpointError, ConfigError."""
        device = prepare_device(config)
        return cls(config, GenerateModel.load(config, device), device)

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, device, model, _described(model), collect=False)
        self.adapter, self.steps = _adapter_of(model), model.family.steps
        merger = Merger((), ())
        self.runner = Runner(merger, device)
        self.scheduler = StepScheduler(
            config.scheduler.max_batched_tokens, lambda call: False, merger.key, merger.tokens
        )

    def _job_of(self, request: Request) -> HearingJob:
        params = sampling_of(request, self.described)
        (sound,) = request.media[HEARD]
        assert isinstance(sound, ArrayData)
        samples = mono_of(sound, self.described.hears_at or 0, HEARD)
        before = (request.prompt or "").strip() or None
        call = self.adapter.prepare_heard(self.loaded.parts, Heard(samples=samples, before=before, params=params))
        seed = seed_of(params.seed)
        return HearingJob(request, [Randomness(seed, torch.Generator().manual_seed(seed))], call=call)

    def warm_up(self) -> None:
        """Listen to something short. Raises what that raises."""
        rate = self.described.hears_at or 0
        sound = to_wire(np.zeros((1, int(_WARM_UP_S * rate)), np.float32), sample_rate=rate)
        run_first_that_works(self, [Request(request_id="warm-up", media={HEARD: [sound]})])

    def _load_again(self) -> GenerateModel:
        return GenerateModel.load(self.config, self.device)

    def _open(self, job: HearingJob) -> None:
        model, call = self.loaded, job.call
        seed = job.randomness[0].seed
        assert seed is not None and call is not None
        session = Session(job.request.request_id, 0, seed, self.settings)
        session.tap = StepTap(self.steps, session.steps)

        def run(_: Parts) -> Transcript:
            return self.adapter.transcribe(model.own(), call)

        session.open(model.parts, run)
        job.opened += 1
        job.started = job.started or time.perf_counter()
        job.sessions[0] = session

    def _advance(self, session: Session) -> None:
        while session.ready:
            session.resume()
            self.scheduler.submit(session.take_calls())
        if session.finished and session.request_id in self.jobs:
            self._ended(self.jobs[session.request_id], session)

    def _ended(self, job: HearingJob, session: Session) -> None:
        if session.error is not None:
            self._fail(job, as_polymux_error(session.error, session.where, computing=session.computing))
            return
        job.transcript = session.result
        self._close(job, session)

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            if job.transcript is not None:
                self._report(job)
                del self.jobs[job.request.request_id]
                self.events.append(job.finished("text", None, None))


def _adapter_of(model: GenerateModel) -> HearingAdapter:
    assert isinstance(model.family, HearingFamily)
    return model.family.adapter


def _described(model: GenerateModel) -> Capabilities:
    """What it takes and makes."""
    family, parts, adapter = model.family, model.parts, _adapter_of(model)
    parameters = {id(p): p.numel() for c in model.components for p in c.module.parameters()}
    return Capabilities(
        family=family.name,
        pipeline=type(parts.model).__name__,
        modality="text",
        arguments=("prompt", *family.arguments),
        required=(HEARD,),
        media={HEARD: 1},
        refused={"partial_images": "there are none of text"},
        samples=True,
        hears_at=adapter.hears_at(parts),
        timestamps=adapter.timestamps(parts),
        languages=adapter.languages(parts),
        device=str(parts.model.device),
        dtype=str(parts.model.dtype).removeprefix("torch."),
        parameters=sum(parameters.values()),
        storage=model.weights.describe(),
    )

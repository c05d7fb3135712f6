"""The engine of a stage that writes down what is said in a sound, with a model of transformers.

As the engine of those that speak: the model's own `generate` is a coroutine of calls of its modules, interleaved with
those of other requests. A request is one session; its text comes when it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.diffusion.session import Session
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Job, Randomness
from polymux.engine.reference import mono_of
from polymux.engine.seeds import seed_of
from polymux.engine.sound_job import StepTap
from polymux.engine.transformers_engine import TransformersEngine
from polymux.engine.warmup import run_first_that_works
from polymux.errors import InvalidRequestError
from polymux.families.generate import Call
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
            profile=self.profile(),
        )


class HearingEngine(TransformersEngine[HearingJob]):
    """Implements `engine.base.StageEngine`."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.adapter = _adapter_of(model)

    def _job_of(self, request: Request) -> HearingJob:
        params = sampling_of(request, self.described)
        (sound,) = request.media[HEARD]
        assert isinstance(sound, ArrayData)
        samples = mono_of(sound, self.described.hears_at or 0, HEARD)
        before = (request.prompt or "").strip() or None
        if before is not None and "prompt" not in self.described.arguments:
            raise InvalidRequestError(f"prompt: {self.described.pipeline} takes none", param="prompt")
        call = self.adapter.prepare_heard(self.loaded.parts, Heard(samples=samples, before=before, params=params))
        seed = seed_of(params.seed)
        return HearingJob(request, [Randomness(seed, torch.Generator().manual_seed(seed))], call=call)

    def warm_up(self) -> None:
        """Listen to something short. Raises what that raises."""
        rate = self.described.hears_at or 0
        sound = to_wire(np.zeros((1, int(_WARM_UP_S * rate)), np.float32), sample_rate=rate)
        run_first_that_works(self, [Request(request_id="warm-up", media={HEARD: [sound]})])

    def _open(self, job: HearingJob) -> None:
        session, call = self._new_session(job), job.call
        assert call is not None
        session.tap = StepTap(self.loaded.family.steps, session.steps)
        self._start(job, session, lambda own: self.adapter.transcribe(own, call))

    def _done(self, job: HearingJob, session: Session, result: Transcript) -> None:
        job.transcript = result

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            if job.transcript is not None:
                self._report(job)
                del self.jobs[job.request.request_id]
                self.events.append(job.finished("text", None, None))

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        family, adapter, parts = model.family, _adapter_of(model), model.parts
        assert isinstance(family, HearingFamily)
        return msgspec.structs.replace(
            model.facts(),
            arguments=("prompt", *family.arguments) if family.prompted else family.arguments,
            required=(HEARD,),
            media={HEARD: 1},
            refused={"partial_images": "there are none of text"},
            hears_at=adapter.hears_at(parts),
            timestamps=adapter.timestamps(parts),
            languages=adapter.languages(parts),
        )


def _adapter_of(model: GenerateModel) -> HearingAdapter:
    assert isinstance(model.family, HearingFamily)
    return model.family.adapter

"""The engine of a stage that answers conversations with a model of transformers.

A request is one session: the model's own `generate`, as a coroutine of calls of its modules. What a conversation
brings (pictures, sound, video) is made into arguments in a thread, so that nobody waits for it. Calls are interleaved;
with --merge-decoding, steps of one token are merged. Knows requests and the queue between them; not what a model
computes, and nothing of processes.
"""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.session import Session
from polymux.engine.chat_inputs import question_of
from polymux.engine.chat_job import ChatJob, ChatTap
from polymux.engine.chat_model import described
from polymux.engine.decode_merging import DecodeMerger, DecodeRunner, may_be_merged
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_engine import parts_of, sound_of
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Randomness
from polymux.engine.seeds import seed_of
from polymux.engine.transformers_engine import IDLE_S, TransformersEngine
from polymux.engine.warmup import run_first_that_works
from polymux.engine.writing import Penalties, Writer
from polymux.errors import ConfigError
from polymux.families.chat import ChatCall, ChatFamily, Hooks, Question
from polymux.families.generate import Parts
from polymux.media.wire import Array
from polymux.request import Capabilities, Request, SamplingParams
from polymux.sampling import sampling_of


class ChatEngine(TransformersEngine[ChatJob]):
    """Implements `engine.base.StageEngine` for the models of transformers that answer."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        assert isinstance(model.family, ChatFamily)
        self.family = model.family
        if config.scheduler.merge_decoding:
            if not _proven(model):
                what = f"merge_decoding: for {self.described.pipeline} nothing proves that it gives the same answers"
                raise ConfigError(what, param="merge_decoding")
            merger = DecodeMerger(self.family.decoders_merged, self.family.heads_merged)
            self._run_with(merger, DecodeRunner(merger, device))
        # Its own: the thread encodes with the other one meanwhile, and a tokenizer stands only one at a time.
        self.tokenizer = copy.deepcopy(self.family.adapter.tokenizer(model.parts))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inputs")

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        return described(model, config)

    def _may_merge(self, call: Call) -> bool:
        return self.config.scheduler.merge_decoding and self.runner.may_merge(call.component.name)

    def _job_of(self, request: Request) -> ChatJob:
        params = sampling_of(request, self.described)
        seed = seed_of(params.seed)
        return ChatJob(
            request=request,
            randomness=[Randomness(seed, torch.Generator().manual_seed(seed))],
            writer=Writer(self.tokenizer, tuple(params.stop or ())),
            preparing=self._thread.submit(self._ask, self.loaded.parts, request, params),
        )

    def _ask(self, parts: Parts, request: Request, params: SamplingParams) -> ChatCall:
        """In the thread."""
        with torch.no_grad():
            question: Question = question_of(request, params, self.described, self.config.limits.max_audio_seconds)
            return self.family.adapter.ask(parts, question)

    def _admit(self) -> None:
        for job in list(self.jobs.values()):
            if job.call is None and job.preparing.done():
                self._prepared(job)
        super()._admit()

    def _prepared(self, job: ChatJob) -> None:
        error = job.preparing.exception()
        if error is not None:
            self._fail(job, as_polymux_error(error, "", computing=False))
        else:
            job.call = job.preparing.result()

    def _open(self, job: ChatJob) -> None:
        session, call, hooks = self._new_session(job), job.call, self._hooks(job)
        assert call is not None
        session.tap = ChatTap(self.family.steps, self.family.speech_steps, session.steps, job.speech)

        def run(own: Parts) -> Array | None:
            sound = self.family.adapter.answer(own, call, hooks)
            job.writer.end()
            return None if sound is None else sound_of(sound)

        self._start(job, session, run)

    def _hooks(self, job: ChatJob) -> Hooks:
        params = sampling_of(job.request, self.described)
        frequency, presence = params.frequency_penalty or 0.0, params.presence_penalty or 0.0
        processors = [Penalties(frequency, presence)] if frequency or presence else []
        return Hooks(stopping_criteria=[job.writer], logits_processor=processors)

    def _done(self, job: ChatJob, session: Session, result: Array | None) -> None:
        if result is not None:
            rate = self.described.sample_rate or 0
            job.seconds_made = result.shape[1] / rate
            job.sound = parts_of(result, rate, self.config.process.output_chunk_bytes)
        job.done = True

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            self.events += job.pieces()
            if job.complete:
                self._report(job)
                del self.jobs[job.request.request_id]
                self.events.append(job.finished(self.family.modality, None, self.described.sample_rate))
        if idle and not self.events and self.jobs:
            self._idle()

    def _idle(self) -> None:
        """All that there is to do is to wait, for the thread or until clients have used up what they have."""
        preparing = [job.preparing for job in self.jobs.values() if job.call is None]
        if preparing:
            wait(preparing, IDLE_S)
        else:
            time.sleep(IDLE_S)
        # Not those in the thread: it is not certain yet that the model takes them.
        self._pulse(job for job in self.jobs.values() if job.call is not None)

    def warm_up(self) -> None:
        """Make one small answer, spoken if the model speaks. Raises what it raised."""
        words: dict[str, Any] = {"prompt": self.family.adapter.sample_text(self.loaded.parts)}
        requests = [Request(request_id="warm-up", sampling=self.family.warmup, **words)]
        run_first_that_works(self, requests)

    def _stop(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _proven(model: GenerateModel) -> bool:
    """Whether its class is one of which the family says that steps may be merged, with the attention that is known."""
    assert isinstance(model.family, ChatFamily)
    decoders = [c for c in model.components if f"{c.name}.forward" in model.family.decoders_merged]
    named = type(model.parts.model).__name__ in model.family.models
    return named and bool(decoders) and all(may_be_merged(c.module) for c in decoders)

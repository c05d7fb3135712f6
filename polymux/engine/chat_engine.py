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
from transformers import LogitsProcessor

from polymux.config import EngineConfig
from polymux.diffusion.session import Session
from polymux.engine.chat_inputs import question_of
from polymux.engine.chat_job import ChatJob, ChatTap, PreparedJob
from polymux.engine.chat_model import described
from polymux.engine.constraint import Constrained
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_engine import parts_of, sound_of
from polymux.engine.generate_model import GenerateModel
from polymux.engine.holding import Holding
from polymux.engine.job import Randomness
from polymux.engine.merging_engine import MergingEngine
from polymux.engine.seeds import seed_of
from polymux.engine.transformers_engine import IDLE_S
from polymux.engine.warmup import run_first_that_works
from polymux.engine.writing import Penalties, Writer
from polymux.families.chat import ChatCall, Hooks, Question
from polymux.families.generate import Parts
from polymux.request import Capabilities, Request, SamplingParams
from polymux.sampling import sampling_of


class ChatEngine(MergingEngine[PreparedJob]):
    """Implements `engine.base.StageEngine` for the models of transformers that answer."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        # Its own: the thread encodes with the other one meanwhile, and a tokenizer stands only one at a time.
        self.tokenizer = copy.deepcopy(self.family.adapter.tokenizer(model.parts))
        self._holding = Holding(self.family.adapter, self.answers.tool_calls)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inputs")

    @property
    def answers(self) -> Capabilities:
        """What the answers are like, of a model that may make pictures too."""
        return self.described.answers or self.described

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        return described(model, config)

    def _job_of(self, request: Request) -> PreparedJob:
        params = sampling_of(request, self.answers)
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
            question: Question = question_of(request, params, self.answers, self.config.limits.max_audio_seconds)
            return self._holding.held(parts, request, params, self.family.adapter.ask(parts, question))

    def _admit(self) -> None:
        for job in list(self.jobs.values()):
            if job.call is None and job.preparing.done():
                self._prepared(job)
        super()._admit()

    def _prepared(self, job: PreparedJob) -> None:
        error = job.preparing.exception()
        if error is not None:
            self._fail(job, as_polymux_error(error, "", computing=False))
        else:
            job.call = job.preparing.result()

    def _open(self, job: PreparedJob) -> None:
        assert isinstance(job, ChatJob)
        session, call = self._new_session(job), job.call
        assert call is not None
        hooks = self._hooks(job, call)
        session.tap = ChatTap(self.family.steps, self.family.speech_steps, session.steps, job.speech)

        self._start(job, session, lambda own: self._answer(job, own, call, hooks))

    def _answer(self, job: ChatJob, own: Parts, call: ChatCall, hooks: Hooks) -> Any:
        """In a session: write the text, and give the sound of it, if it is to be spoken."""
        sound = self.family.adapter.answer(own, call, hooks)
        job.writer.end()
        return None if sound is None else sound_of(sound)

    def _hooks(self, job: ChatJob, call: ChatCall) -> Hooks:
        params = sampling_of(job.request, self.answers)
        frequency, presence = params.frequency_penalty or 0.0, params.presence_penalty or 0.0
        processors: list[LogitsProcessor] = [Penalties(frequency, presence)] if frequency or presence else []
        if call.constraint is not None:
            processors.append(Constrained(call.constraint))
        return Hooks(stopping_criteria=[job.writer], logits_processor=processors, ended=job.writer.end)

    def _done(self, job: PreparedJob, session: Session, result: Any) -> None:
        assert isinstance(job, ChatJob)
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
                self.events.append(job.finished("text", None, self.described.sample_rate))
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

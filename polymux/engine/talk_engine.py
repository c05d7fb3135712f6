"""The engine of a stage that speaks what another one has thought: codes, which a third one decodes.

A request is one session, which begins when all thoughts are there. What it writes is handed on in chunks, of so many
rows as the graph says or all at once. Knows nothing of what thoughts and rows mean.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from polymux.config import EngineConfig
from polymux.connector import Tensors, make_connector
from polymux.diffusion.progress import StepCounter
from polymux.diffusion.session import Session
from polymux.engine.chat_job import ChatTap
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Job, Randomness
from polymux.engine.merging_engine import MergingEngine
from polymux.engine.outbound import WINDOW
from polymux.engine.seeds import seed_of
from polymux.engine.transformers_engine import IDLE_S
from polymux.engine.travel import packed, random_now, split_random, unpacked
from polymux.engine.write_engine import joined
from polymux.errors import InvalidRequestError, NotReadyError, PolymuxError, from_info
from polymux.families.chat import ChatFamily, Question
from polymux.families.generate import Parts
from polymux.families.graph import Arrays, Graph
from polymux.parcel import Chunk, Consumed
from polymux.request import Capabilities, Failed, Finished, Modality, Request, RequestMetrics, SamplingParams

WARM_UP_S = 0.4  # of speech


@dataclass(kw_only=True, eq=False)
class TalkJob(Job):
    question: Question
    kept: Arrays = field(default_factory=dict)  # by the hand-off, of the chunks before
    thoughts: Arrays | None = None  # None: they are not all there
    rows: deque[Tensors] = field(default_factory=deque)
    tail: Arrays = field(default_factory=dict)  # goes with the last chunk
    speech: StepCounter = field(default_factory=StepCounter)
    steps: int = 0  # the most of the speech
    done: bool = False  # the model has returned
    begun: bool = False  # the first chunk has left
    out: bool = False  # the last chunk has left

    @property
    def hungry(self) -> bool:
        return self.thoughts is not None and not self.opened

    @property
    def complete(self) -> bool:
        return self.out

    def drop(self) -> None:
        self.rows.clear()

    def metrics(self) -> RequestMetrics:
        return replace(super().metrics(), audio_tokens=self.speech.done)

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        return Finished(
            request_id=self.request.request_id,
            modality=modality,
            outputs=[],
            seeds=[],
            metrics=self.metrics(),
            finish_reason="length" if self.speech.done >= self.steps else "stop",
        )


class TalkEngine(MergingEngine[TalkJob]):
    """Implements `engine.base.StageEngine` for a stage in the middle of a graph that thinks."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        graph = self.family.graph
        assert isinstance(graph, Graph)
        self._into, self._out_of = graph.into(config.stage), graph.out_of(config.stage)
        self._connector = make_connector(config.stages)
        in_chunks = config.stages.async_chunk
        self._first, self._rows = graph.first if in_chunks else None, graph.chunk if in_chunks else None
        self._longest_s = config.limits.max_audio_seconds

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        assert isinstance(model.family, ChatFamily)
        return replace(model.facts(), voices=model.family.adapter.voices(model.parts))

    def warm_up(self) -> None:
        """Speak a little of nothing. Raises what that raised."""
        thoughts = packed(self.family.adapter.empty_thoughts(self.loaded.parts))
        request = Request(request_id="warm-up", prompt="", sampling=SamplingParams(seed=0))
        longest, self._longest_s = self._longest_s, WARM_UP_S
        try:
            self.add(request)
            self.jobs["warm-up"].thoughts = thoughts
            while self.busy:
                for event in self.step():
                    if isinstance(event, Failed):
                        raise from_info(event.error)
                    if isinstance(event, Chunk):
                        self.taken(event.request_id)
        finally:
            self._longest_s = longest

    def add(self, request: Request) -> None:
        if self.asleep:
            raise NotReadyError("the model is asleep")
        if request.request_id in self.jobs:
            raise InvalidRequestError("request_id: a request of this id is in flight", param="request_id")
        self.jobs[request.request_id] = self._job_of(request)  # the first stage has found it valid

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._connector.forget(request_id)  # also if the request has ended here, and not in the next stage

    def taken(self, request_id: str) -> None:
        super().taken(request_id)
        self._connector.taken(request_id)

    def feed(self, chunk: Chunk) -> None:
        """Thoughts are all there with the last chunk of them."""
        job = self.jobs.get(chunk.request_id)
        if job is None:
            return
        started = time.perf_counter()
        try:
            got, job.kept = self._into.hand_off(job.kept, self._connector.get(chunk.parcel), chunk.last)
        except PolymuxError as error:
            self._fail(job, error)
            return
        self.events.append(Consumed(chunk.request_id, chunk.parcel.seconds + time.perf_counter() - started))
        if chunk.last:
            job.thoughts = got

    def close(self) -> None:
        super().close()
        self._connector.close()

    def _job_of(self, request: Request) -> TalkJob:
        params = request.sampling or SamplingParams()
        voice = params.voice or next(iter(self.described.voices), None)
        question = Question(messages=(), params=params, speaks=True, voice=voice, longest_s=self._longest_s)
        seed = seed_of(params.seed)
        randomness = [Randomness(seed, torch.Generator().manual_seed(seed))]
        steps = self.family.adapter.speech_steps(self.loaded.parts, question)
        return TalkJob(request=request, randomness=randomness, question=question, steps=steps)

    def _open(self, job: TalkJob) -> None:
        session = self._new_session(job)
        session.tap = ChatTap(self.family.speech_steps, self.family.speech_steps, session.steps, job.speech)
        self._start(job, session, lambda own: self._talk(job, own))

    def _talk(self, job: TalkJob, own: Parts) -> None:
        """In a session: it draws on where the stage before has stopped drawing."""
        assert job.thoughts is not None
        thoughts, random = split_random(job.thoughts, self.device)
        job.thoughts = {}
        if random is not None:
            random.apply()
        told = unpacked(thoughts, self.device)
        self.family.adapter.talk(own, job.question, told, lambda rows: job.rows.append(packed(rows)))
        if self._out_of.random:
            job.tail = random_now(self.device)

    def _done(self, job: TalkJob, session: Session, result: None) -> None:
        job.done = True

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            try:
                while (chunk := self._next_chunk(job)) is not None:
                    self.events.append(chunk)
            except PolymuxError as error:
                self._fail(job, error)
                continue
            if job.complete:
                self._report(job)
                del self.jobs[job.request.request_id]
                self.events.append(job.finished(self.family.modality, None, None))
        if idle and not self.events and self.jobs:
            time.sleep(IDLE_S)
            self._pulse(job for job in self.jobs.values() if job.opened)

    def _next_chunk(self, job: TalkJob) -> Chunk | None:
        """What may be sent now; it counts as under way."""
        count = self._rows if job.begun else self._first  # None: all of them
        full = count is not None and len(job.rows) >= count
        if job.out or job.under_way >= WINDOW or not (job.done or full):
            return None
        taken = [job.rows.popleft() for _ in range(min(len(job.rows), count or len(job.rows)))]
        last = job.done and not job.rows
        arrays = {**joined(taken), **(job.tail if last else {})}
        parcel = self._connector.put(job.request.request_id, arrays)
        job.under_way += 1
        job.begun, job.out = True, last
        return Chunk(job.request.request_id, 0, parcel, ends_part=last, last=last)

    def _fail(self, job: TalkJob, error: PolymuxError) -> None:
        super()._fail(job, error)
        self._connector.forget(job.request.request_id)

"""The engine of language models whose answers go on together: one batch of tokens per step, over a paged cache.

A step: plan which sequences go on and which prompts begin, launch that, and take the tokens of what was launched: on a
GPU those of the step before, while the device works on this one. What a conversation is made into, it is made into in a
thread. Knows requests and the queue between them; not what a model computes, and nothing of processes.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from polymux.ar.features import Features
from polymux.ar.network import Network
from polymux.ar.ranks import Accord
from polymux.ar.runner import Flight
from polymux.ar.scheduler import Plan
from polymux.ar.sequence import Sequence
from polymux.config import EngineConfig
from polymux.diffusion.run_log import RunLog
from polymux.diffusion.timing import Elapsed, Stopwatch
from polymux.diffusion.tracebacks import drop_frames
from polymux.engine.ar_company import Company
from polymux.engine.ar_job import ArJob, fitted, sequence_of
from polymux.engine.ar_media import read
from polymux.engine.ar_state import ArState
from polymux.engine.chat_inputs import question_of
from polymux.engine.chat_model import described
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import GenerateModel
from polymux.engine.holding import Holding
from polymux.engine.seeds import seed_of
from polymux.engine.transformers_engine import IDLE_S
from polymux.engine.warmup import run_first_that_works
from polymux.engine.writing import Writer
from polymux.errors import NotReadyError, OutOfMemoryError, PolymuxError, RequestAbortedError
from polymux.families.chat import ChatCall, ChatFamily, Tensors
from polymux.families.generate import Parts
from polymux.memory.measure import device_bytes, release, resident_bytes, used_bytes
from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Failed, Progress, Request, SamplingParams, StageStats
from polymux.sampling import sampling_of
from polymux.validation import refuse, validate

CACHE = "prefix_cache"


@dataclass
class _Launched:
    flight: Flight
    elapsed: Elapsed


class ArEngine:
    """Implements `engine.base.StageEngine`."""

    def __init__(
        self,
        config: EngineConfig,
        model: GenerateModel,
        device: torch.device,
        ahead: bool | None = None,
        company: Company | None = None,
    ) -> None:
        """`ahead`: launch a step before the tokens of the one before are known (default: on a GPU). `company`: the
        other ranks, where the model is divided."""
        assert isinstance(model.family, ChatFamily)
        self._company, self._accord = company, Accord(company.group if company else None)
        self._config, self._device, self._family = config, device, model.family
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._asleep = 0  # the level
        self._waits = True  # for what is prepared, if there is nothing else to do
        self._jobs: dict[str, ArJob] = {}
        self._events: list[Event] = []
        self._launched: _Launched | None = None
        self._log = RunLog()
        self._steps, self._seconds, self._preempted = 0, 0.0, 0  # of requests that have ended; of states that are gone
        self._looked_for = self._found = 0
        self._model: GenerateModel | None = None
        self._network: Network | None = None
        self._state: ArState | None = None
        self._handle: int | None = None
        self._warm = False
        self._take_in(model)
        # Its own: the thread encodes with the other one meanwhile, and a tokenizer stands only one at a time.
        self._tokenizer = copy.deepcopy(self._family.adapter.tokenizer(model.parts))
        self._holding = Holding(self._family.adapter, self._described.tool_calls)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inputs")

    @property
    def capabilities(self) -> Capabilities:
        return self._described

    @property
    def stats(self) -> StageStats:
        running, used, blocks = 0, 0, 0
        preempted, looked_for, found = self._preempted, self._looked_for, self._found
        if self._state is not None:
            pool, scheduler = self._state.pool, self._state.scheduler
            running, used, blocks = len(scheduler.running), pool.used, pool.count
            preempted += scheduler.preemptions
            looked_for, found = looked_for + scheduler.looked_for, found + scheduler.found
        return StageStats(
            running=running,
            waiting=len(self._jobs) - running,
            steps=self._steps + sum(len(job.writer.tokens) for job in self._jobs.values()),
            seconds={"denoise": self._seconds},
            runs=self._log.read(),
            cache_queries={CACHE: looked_for} if looked_for else {},
            cache_hits={CACHE: found} if found else {},
            kv_blocks=blocks,
            kv_blocks_used=used,
            preemptions=preempted,
            device_memory=device_bytes(self._device),
            host_memory=resident_bytes(),
        )

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._events)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError; then the engine holds nothing of it."""
        if self._asleep or self._model is None:
            raise NotReadyError("the model is asleep")
        validate(request, self._described, self._config.limits)
        if request.request_id in self._jobs:
            raise refuse("request_id", request.request_id, "a request of this id is in flight")
        params = sampling_of(request, self._described)
        self._jobs[request.request_id] = ArJob(
            request=request,
            seed=seed_of(params.seed),
            writer=Writer(self._tokenizer, tuple(params.stop or ())),
            preparing=self._thread.submit(self._ask, self._model.parts, request, params),
        )

    def abort(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._fail(self._jobs[request_id], RequestAbortedError("the request was aborted"))

    def taken(self, request_id: str) -> None:
        return None  # text needs no window: there is never much of it

    def feed(self, chunk: Chunk) -> None:
        raise TypeError("this stage is the first one: there is none before it")

    @torch.no_grad()
    def step(self) -> list[Event]:
        state = self._state
        if state is not None:
            self._admit(state)
            before = self._launched
            self._launched = self._launch(state)
            if not self._ahead:
                before, self._launched = self._launched, None
            if before is not None:
                self._land(state, before)
            elif self._waits and self._launched is None and not self._events:
                wait([job.preparing for job in self._jobs.values() if job.call is None], IDLE_S)
        events, self._events = self._events, []
        return events

    def warm_up(self) -> None:
        """Capture what can be captured, and make one small answer. Raises what it raised."""
        assert self._state is not None and self._model is not None
        self._warm = True
        with torch.no_grad():
            self._state.runner.prepare()
        words = self._family.adapter.sample_text(self._model.parts)
        run_first_that_works(self, [Request(request_id="warm-up", prompt=words, sampling=self._family.warmup)])
        self._state.scheduler.forget()

    def check_idle(self) -> None:
        """Raises NotReadyError if there is nothing that could be put to sleep."""
        if self.busy or self._asleep or self._model is None:
            raise NotReadyError("the engine is busy" if self.busy else f"the engine sleeps, at level {self._asleep}")

    def sleep(self, level: int) -> int:
        """As the other engines do. Raises ConfigError, with everything in place, if it cannot."""
        self.check_idle()
        assert self._model is not None
        before = used_bytes(self._device)
        if level == 1:
            self._model.sleep()
            self._drop()
        else:
            self._drop()
            self._model.close()
            self._model = self._network = None
        self._asleep = level
        release(self._device)
        return max(before - used_bytes(self._device), 0)

    def wake_up(self) -> None:
        try:
            if self._asleep == 1:
                assert self._model is not None and self._network is not None
                model, network = self._model, self._network
                self._accord.all(lambda: model.wake(self._device))
                self._open(model, network)
            elif self._asleep == 2:
                group = self._company.group if self._company else None
                self._take_in(self._accord.all(lambda: GenerateModel.load(self._config, self._device, group)))
        except torch.OutOfMemoryError as error:
            release(self._device)
            raise OutOfMemoryError(f"there is no room to wake up: {error}") from None
        self._asleep = 0

    def close(self) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, RequestAbortedError("the engine was closed"))
        self._thread.shutdown(cancel_futures=True)
        self._drop()
        if self._model is not None:
            self._model.close()

    def _take_in(self, model: GenerateModel) -> None:
        """The model has come. What writes runs as a whole: nobody captures calls of its parts."""
        adapter = self._family.adapter
        writer = adapter.writer(model.parts)
        inside = {id(module) for module in writer.modules()}
        for component in model.components:
            if id(component.module) in inside:
                component.detach()
        self._network = Network(writer, adapter.layer(model.parts), self._config.parallel.tensor_parallel_size)
        self._open(model, self._network)

    @torch.no_grad()
    def _open(self, model: GenerateModel, network: Network) -> None:
        """Its weights are in place: make room for what it reads."""
        context = self._family.adapter.context(model.parts)
        self._model = model
        self._state = ArState.make(self._config, network, self._handle, context, self._company)
        self._handle = self._state.handle
        if self._warm:
            self._state.runner.prepare()
        room = self._state.tokens
        self._described = replace(
            described(model, self._config), merges=True, context=room if context is None else min(context, room)
        )

    def _drop(self) -> None:
        if self._state is not None:
            scheduler = self._state.scheduler
            self._preempted += scheduler.preemptions
            self._looked_for += scheduler.looked_for
            self._found += scheduler.found
        self._state = self._launched = None

    # The life of a request: prepared, admitted, in flight again and again, ended.

    def _ask(self, parts: Parts, request: Request, params: SamplingParams) -> ChatCall:
        """In the thread."""
        with torch.no_grad():
            question = question_of(request, params, self._described, self._config.limits.max_audio_seconds)
            call = fitted(self._family.adapter.ask(parts, question), params, self._described.context or 0)
            return self._holding.held(parts, request, params, call)

    def _admit(self, state: ArState) -> None:
        """Those that are prepared join the queue, up to one whose media are read: others go on before the next one."""
        for job in [job for job in self._jobs.values() if job.sequence is None and job.preparing.done()]:
            refused = job.preparing.exception()
            if refused is not None:
                self._fail(job, as_polymux_error(refused, "", computing=False))
                continue
            job.call = job.preparing.result()
            try:
                features = self._read(job, job.call)
            except Exception as error:  # whatever the model raises is the end of this request
                self._fail(job, as_polymux_error(error, drop_frames(error), computing=True))
                continue
            job.preparing = Future()  # the one that is done holds what was read
            self._join(state, job, features)
            if features is not None:
                return

    def _join(self, state: ArState, job: ArJob, features: Features | None) -> None:
        assert self._model is not None
        adapter, params = self._family.adapter, sampling_of(job.request, self._described)
        settings = adapter.writer(self._model.parts).generation_config
        job.sequence = sequence_of(job, params, settings, adapter.prefix, features)
        state.scheduler.add(job.sequence)
        self._events.append(Progress(job.request.request_id, "queued", 0, 0))

    def _read(self, job: ArJob, call: ChatCall) -> Features | None:
        """What its media are to the model."""
        assert self._model is not None
        watch = Stopwatch(self._device)
        job.call, features = read(self._model, call)
        if features is not None:
            elapsed = watch.stop()
            self._log.count(self._name, "encode", 1, elapsed)
            job.reading, job.started = elapsed(), watch.start
        return features

    def _launch(self, state: ArState) -> _Launched | None:
        plan = state.scheduler.plan()
        if not plan:
            return None
        watch = Stopwatch(self._device)
        for piece in plan.pieces:
            job = self._job(piece.sequence)
            job.started = job.started or watch.start
        try:
            flight = state.runner.launch(plan)
        except Exception as error:  # whatever the model raises is the end of those in this step
            self._fall(state, plan, error)
            return None
        elapsed = watch.stop()
        self._log.count(self._name, "denoise", len(plan.decodes) + len(plan.pieces), elapsed)
        return _Launched(flight, elapsed)

    def _land(self, state: ArState, launched: _Launched) -> None:
        """The tokens of a step are there. What it was for, and who has left meanwhile, is told by the sequences."""
        flight, plan = launched.flight, launched.flight.plan
        try:
            tokens, seconds = flight.tokens(), launched.elapsed()
        except Exception as error:  # a device says what has gone wrong when it is asked for a result
            self._fall(state, plan, error)
            return
        own = [(sequence, 1) for sequence in plan.decodes]
        own += [(piece.sequence, piece.end - piece.start) for piece in plan.pieces]
        for sequence, count in own:
            if not sequence.ended:
                self._job(sequence).took(seconds, sum(n for _, n in own), count)
        for sequence, token in zip(flight.sequences, tokens, strict=True):
            if sequence.ended:
                continue
            failure = flight.unheld.get(sequence)
            if failure is not None:
                self._fail(self._job(sequence), as_polymux_error(failure, drop_frames(failure), computing=True))
            else:
                self._take(state, sequence, token)

    def _take(self, state: ArState, sequence: Sequence, token: int) -> None:
        job = self._job(sequence)
        sequence.take(token)
        state.scheduler.know(sequence)
        try:
            job.writer.write(token)
            if sequence.ended:
                job.writer.end()
        except Exception as error:  # whatever a tokenizer says to a token, it is said to this request alone
            self._fail(job, as_polymux_error(error, drop_frames(error), computing=True))
            return
        if sequence.ended or job.writer.stopped:
            state.scheduler.remove(sequence)
            self._events += job.pieces()
            self._complete(state, job, sequence)
        else:
            self._events += job.pieces()

    def _thoughts(self, state: ArState, job: ArJob, sequence: Sequence) -> Tensors:
        """Of an answer that is at its end: what has to be known to speak it, each thing where it is. Raises
        GenerationError if there is nothing to be spoken."""
        assert self._model is not None and job.call is not None and sequence.heard is not None
        count = len(sequence.tokens) - 1  # the last one was chosen, and not computed
        embeds, states = state.runner.embedded(sequence, count), sequence.heard.states(count)
        tokens = torch.tensor(sequence.tokens)[None]
        return self._family.adapter.thoughts(self._model.parts, job.call, tokens, embeds[None], states[None])

    def _complete(self, state: ArState, job: ArJob, sequence: Sequence) -> None:
        """All of its text is written, and told."""
        self._end(job)
        self._events.append(job.finished())

    def _fall(self, state: ArState, plan: Plan, error: Exception) -> None:
        """A step has failed, and what it was to write is not there. With other ranks it is the end of all: they may
        wait in the middle of it for what will not come."""
        if self._company is not None:
            raise error
        state.pool.forget()
        problem = as_polymux_error(error, drop_frames(error), computing=True)
        for sequence in (*plan.decodes, *(piece.sequence for piece in plan.pieces)):
            if not sequence.ended:
                self._fail(self._job(sequence), problem)

    def _job(self, sequence: Sequence) -> ArJob:
        return self._jobs[str(sequence.name)]

    def _end(self, job: ArJob) -> None:
        del self._jobs[job.request.request_id]
        self._steps += len(job.writer.tokens)
        self._seconds += job.seconds

    def _fail(self, job: ArJob, error: PolymuxError) -> None:
        job.preparing.cancel()
        if job.sequence is not None and self._state is not None:
            self._state.scheduler.remove(job.sequence)
        self._end(job)
        self._events.append(Failed(job.request.request_id, error.info()))

    @property
    def _name(self) -> str:
        """Of what runs, as the family calls it."""
        return self._family.steps[0].partition(".")[0]

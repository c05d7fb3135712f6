"""The engine of language models that an installed vLLM runs, through its public API.

What a request is asked for, and what comes of it, is as in the other engines of models that answer: its conversation is
made into tokens here, in a thread, by the checkpoint's own template, and the tokens that come back are made into text
here. vLLM has its own processes, its own network, and its own order of requests. Its event loop runs while this engine
makes a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from msgspec.structs import replace

from polymux.ar.network import beyond
from polymux.config import EngineConfig
from polymux.diffusion.tracebacks import drop_frames
from polymux.engine.ar_job import drawing_of, fitted
from polymux.engine.chat_inputs import question_of
from polymux.engine.chat_model import answering
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import described_by
from polymux.engine.seeds import seed_of
from polymux.engine.transformers_engine import IDLE_S
from polymux.engine.vllm_api import Vllm
from polymux.engine.vllm_job import VllmJob
from polymux.engine.vllm_settings import arguments, check, claim
from polymux.engine.warmup import run_first_that_works
from polymux.engine.writing import Writer
from polymux.errors import (
    ConfigError,
    GenerationError,
    NotReadyError,
    PolymuxError,
    RequestAbortedError,
    StageDeadError,
)
from polymux.families.chat import ChatCall
from polymux.loading.outline import Outline, load_outline
from polymux.memory.measure import resident_bytes
from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Failed, FinishReason, Progress, Request, StageStats
from polymux.sampling import sampling_of
from polymux.validation import refuse, validate

log = logging.getLogger(__name__)

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Hosted:
    """What vLLM is started with, each time that it is."""

    vllm: Vllm
    arguments: dict[str, Any]
    kind: str  # of device


class VllmEngine:
    """Implements `engine.base.StageEngine`."""

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Start vLLM. Raises CheckpointError, and ConfigError for what is not there, or cannot be."""
        check(config)
        kind = claim(config)
        vllm, outline = Vllm.installed(), load_outline(config)
        odd = beyond(outline.parts.model.generation_config)
        if odd is not None:
            raise ConfigError(f"--decoding vllm: {odd}, which is not handed on to vllm", param="decoding")
        return cls(config, outline, Hosted(vllm, arguments(config, outline.folder, kind), kind))

    def __init__(self, config: EngineConfig, outline: Outline, hosted: Hosted) -> None:
        self._config, self._outline, self._hosted = config, outline, hosted
        # Its own: the thread encodes with the other one meanwhile, and a tokenizer stands only one at a time.
        self._tokenizer = copy.deepcopy(outline.family.adapter.tokenizer(outline.parts))
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._names = itertools.count()
        self._jobs: dict[str, VllmJob] = {}
        self._tasks = set[asyncio.Task[None]]()  # of jobs, and of those that are aborted and not yet forgotten
        self._events: list[Event] = []
        self._steps, self._seconds = 0, 0.0  # of requests that have ended
        self._asleep = 0  # the level
        self._death: Exception | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inputs")
        try:
            self._engine: Any = self._loop.run_until_complete(self._start())
        except BaseException:
            self._thread.shutdown()
            self._loop.close()
            raise
        self._described = self._describe()

    @property
    def capabilities(self) -> Capabilities:
        return self._described

    @property
    def stats(self) -> StageStats:
        """What vLLM knows of its cache and of its device's memory, it keeps to itself."""
        running = sum(job.tokens > 0 for job in self._jobs.values())
        return StageStats(
            running=running,
            waiting=len(self._jobs) - running,
            steps=self._steps + sum(job.tokens for job in self._jobs.values()),
            seconds={"denoise": self._seconds},
            host_memory=resident_bytes(),
        )

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._events or self._tasks)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError; then the engine holds nothing of it."""
        if self._asleep:
            raise NotReadyError("the model is asleep")
        validate(request, self._described, self._config.limits)
        if request.request_id in self._jobs:
            raise refuse("request_id", request.request_id, "a request of this id is in flight")
        params = sampling_of(request, self._described)
        job = VllmJob(
            request=request,
            params=params,
            seed=seed_of(params.seed),
            name=str(next(self._names)),
            writer=Writer(self._tokenizer, tuple(params.stop or ())),
        )
        self._jobs[request.request_id] = job
        job.task = self._loop.create_task(self._answer(job))
        self._tasks.add(job.task)
        job.task.add_done_callback(self._forget)

    def abort(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._fail(self._jobs[request_id], RequestAbortedError("the request was aborted"))

    def taken(self, request_id: str) -> None:
        return None  # text needs no window: there is never much of it

    def feed(self, chunk: Chunk) -> None:
        raise TypeError("this stage is the first one: there is none before it")

    def step(self) -> list[Event]:
        """Raises StageDeadError if vLLM has died."""
        if self._jobs or self._tasks:
            self._loop.run_until_complete(self._turn())
        if self._death is not None:
            raise StageDeadError(f"vllm has ended: {self._death}")
        events, self._events = self._events, []
        return events

    def warm_up(self) -> None:
        """Make one small answer. Raises what it raised."""
        family, parts = self._outline.family, self._outline.parts
        words = family.adapter.sample_text(parts)
        run_first_that_works(self, [Request(request_id="warm-up", prompt=words, sampling=family.warmup)])

    def sleep(self, level: int) -> int:
        """Level 1 is vLLM's own; at level 2 there is no vLLM. Raises ConfigError, with everything in place, if it
        cannot."""
        if self.busy or self._asleep:
            raise NotReadyError("the engine is busy" if self.busy else f"the engine sleeps, at level {self._asleep}")
        if level == 1 and not self._hosted.arguments["enable_sleep_mode"]:
            raise ConfigError("level: vllm keeps weights on the host only if they were on a GPU; level 2 ends it",
                              param="level")  # fmt: skip
        before = self._held()
        self._loop.run_until_complete(self._engine.sleep(level=1) if level == 1 else self._stop())
        self._asleep = level
        return max(before - self._held(), 0)

    def wake_up(self) -> None:
        if self._asleep == 1:
            self._loop.run_until_complete(self._engine.wake_up())
        elif self._asleep:
            self._engine = self._loop.run_until_complete(self._start())
        self._asleep = 0

    def close(self) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, RequestAbortedError("the engine was closed"))
        self._loop.run_until_complete(self._stop())
        self._thread.shutdown(cancel_futures=True)
        self._loop.close()

    async def _start(self) -> Any:
        """In the loop: vLLM's tasks belong to it."""
        return self._hosted.vllm.start(self._hosted.arguments)

    async def _stop(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _describe(self) -> Capabilities:
        outline = self._outline
        base = outline.facts(self._hosted.kind, self._hosted.arguments["dtype"])
        known = described_by(base, outline.family, outline.parts, self._config)
        made = answering(known, outline.family, outline.parts, self._config, constrains=True)  # vLLM brings xgrammar
        room = int(self._engine.model_config.max_model_len)
        context = room if made.context is None else min(made.context, room)
        storage = f"vllm {self._hosted.vllm.version} has the weights"
        refused = made.refused | {"profile": "vllm tells none"}
        return replace(made, merges=True, context=context, storage=storage, refused=refused)

    def _held(self) -> int:
        """Memory of the stage's GPUs that is in use, whoever has it: vLLM's processes are not this one."""
        if self._hosted.kind != "cuda":
            return 0
        return sum(map(torch.cuda.device_memory_used, range(self._config.parallel.tensor_parallel_size)))

    # The life of a request: prepared, handed to vLLM, ended.

    async def _turn(self) -> None:
        """Until there is something to be said, or messages have to be looked for."""
        if not self._events:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), IDLE_S)
        await asyncio.sleep(0)
        self._news.clear()

    async def _answer(self, job: VllmJob) -> None:
        vllm, params = self._hosted.vllm, job.params
        try:
            job.call = call = await self._loop.run_in_executor(self._thread, self._ask, job)
            drawing = drawing_of(call, params, self._outline.parts.model.generation_config, job.seed)
            how = vllm.how(job.request, params, call, drawing, self._described.tool_calls or "hermes")
            self._say(Progress(job.request.request_id, "queued", 0, 0))
            job.begun = time.perf_counter()
            async with contextlib.aclosing(self._engine.generate(vllm.prompt(call), how, job.name)) as outputs:
                async for output in outputs:
                    self._take(job, output.outputs[0])
                    if job.writer.stopped:
                        break
            if job.writer.stopped:
                await self._engine.abort(job.name)
            elif self._jobs.get(job.request.request_id) is job:
                self._fail(job, GenerationError("vllm has said no more of it"))
        except asyncio.CancelledError:  # by `_fail`
            if job.begun is not None:
                await self._engine.abort(job.name)
        except Exception as error:  # whatever vLLM raises, it is said to this request; but for its death
            self._fell(job, error)

    def _ask(self, job: VllmJob) -> ChatCall:
        """In the thread."""
        outline, limits = self._outline, self._config.limits
        question = question_of(job.request, job.params, self._described, limits.max_audio_seconds)
        call = outline.family.adapter.ask(outline.parts, question)
        return fitted(call, job.params, self._described.context or 0)

    def _take(self, job: VllmJob, output: Any) -> None:
        job.write(output.token_ids, last=output.finish_reason is not None)
        self._say(job.piece())
        reason = "stop" if job.writer.stopped else output.finish_reason
        if reason is None:
            return
        if reason not in _REASONS:
            self._fail(job, GenerationError(f"vllm has ended the answer: {reason}"))
            return
        self._end(job)
        self._say(job.finished(_REASONS[reason]))

    def _fell(self, job: VllmJob, error: Exception) -> None:
        vllm = self._hosted.vllm
        if self._engine.errored:
            self._death = error
            self._news.set()
        elif self._jobs.get(job.request.request_id) is not job:
            log.info("vllm, of a request that has ended: %s: %s", type(error).__name__, error)
        elif job.begun is not None and not job.tokens and isinstance(error, vllm.refusals):
            self._fail(job, vllm.refused(error, job.request))
        else:
            self._fail(job, as_polymux_error(error, drop_frames(error), computing=job.begun is not None))

    def _say(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def _end(self, job: VllmJob) -> None:
        del self._jobs[job.request.request_id]
        self._steps += job.tokens
        self._seconds += job.seconds

    def _fail(self, job: VllmJob, error: PolymuxError) -> None:
        if job.task is not None:
            job.task.cancel()
        self._end(job)
        self._say(Failed(job.request.request_id, error.info()))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._news.set()

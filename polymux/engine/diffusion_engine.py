"""The engine of a diffusion stage.

A step: let every session that can go on run until it needs a component, choose the calls to run, run them as one.
Knows requests, their sessions and the queue between them; not what a pipeline computes, and nothing of processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.component import Component
from polymux.diffusion.encoder_cache import EncoderCache
from polymux.diffusion.frame_stream import FrameTap
from polymux.diffusion.merging import Merger
from polymux.diffusion.outputs import RawOutput, media_of, raw_output
from polymux.diffusion.pipeline_call import CallShape, call_arguments, describe, replay_arguments
from polymux.diffusion.preview import Replay, Watch
from polymux.diffusion.rates import SoundShape
from polymux.diffusion.runner import InPlace, Runner
from polymux.diffusion.session import ResultSpecs, Session, SessionSettings
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.diffusion.tracebacks import drop_frames
from polymux.diffusion.tuned import AdapterSet
from polymux.engine.device import resolve_device
from polymux.engine.failure import as_polymux_error
from polymux.engine.job import Job, randomness_of
from polymux.engine.machine_stats import machine_stats
from polymux.engine.model import Model
from polymux.engine.outbound import Outbound, OutputThread
from polymux.engine.warmup import run_first_that_works, warmup_requests
from polymux.errors import (
    NotReadyError,
    OutOfMemoryError,
    PolymuxError,
    RequestAbortedError,
)
from polymux.memory.measure import release, used_bytes
from polymux.memory.residency import Residency
from polymux.request import Capabilities, Event, Failed, LoRARequest, Preview, Request, StageStats
from polymux.validation import refuse, validate

log = logging.getLogger(__name__)

OUTPUT_POLL_S = 0.002  # for messages, while outputs are all that there is to do


class DiffusionEngine:
    """Implements `engine.base.StageEngine` for any diffusers pipeline."""

    @classmethod
    def load(cls, config: EngineConfig, components: dict[str, object] | None = None) -> DiffusionEngine:
        """Load the model; `components`: parts that the checkpoint lacks. Raises CheckpointError, ConfigError."""
        device = resolve_device(config.device.device)
        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)
        given = dict(components or {})
        model = Model.load(config, device, given)
        return cls(config, model.pipeline, device, model=model, given=given)

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Any,
        device: torch.device,
        *,
        model: Model | None = None,
        given: dict[str, object] | None = None,
    ) -> None:
        """An engine for a pipeline that is loaded already, with its modules on the host or on `device`. `model` is what
        has been made of it, if it has; `given` are the parts that its checkpoint lacks."""
        self.config, self.device, self.given = config, device, given or {}
        self.asleep = 0  # the level
        self.model: Model | None = model or Model.of(config, pipeline, device)
        self.family = self.model.family
        self.shape, self.sound = CallShape.of(pipeline, self.family.modality), SoundShape.of(pipeline)
        described = describe(pipeline, self.family, self.shape)
        self.described = msgspec.structs.replace(
            described, storage=self.model.weights.describe(), frame_interpolation=self.model.between is not None
        )
        self.max_sessions = config.scheduler.max_num_seqs
        if not self.family.pipelines and self.max_sessions > 1:
            # What a pipeline that nobody has looked at does to its components in a call might reach other requests.
            log.warning("%s is of no family that polymux knows: one request at a time", type(pipeline).__name__)
            self.max_sessions = 1
        merger = Merger(self.family.padding, self.family.shared)
        self.runner = Runner(merger, self.device, self.weights, self.model.step_cache)
        self.encoded = EncoderCache(config.caches.prompt_bytes if self.family.pipelines else 0, merger.contents)
        self.scheduler = StepScheduler(
            config.scheduler.max_batched_tokens,
            self._may_merge,
            merger.key,
            merger.tokens,
            ready=lambda call: self.weights.ready(call.component.name),
        )
        collect = self.family.collect_guidance and self.max_sessions > 1
        self.settings = SessionSettings(self.device, ResultSpecs(), collect, self.components)
        self.outputs = OutputThread(self.device, config.process.output_chunk_bytes)
        self.jobs: dict[str, Job] = {}
        self.model.adapters.check_standing()
        self.events: list[Event] = []
        self.totals = {"steps": 0.0, "encode": 0.0, "denoise": 0.0, "decode": 0.0}  # of sessions that have ended

    @property
    def loaded(self) -> Model:
        """The model. Raises NotReadyError while there is none."""
        if self.model is None:
            raise NotReadyError("the model is asleep, and its weights are dropped")
        return self.model

    @property
    def pipeline(self) -> Any:
        return self.loaded.pipeline

    @property
    def components(self) -> tuple[Component, ...]:
        return self.loaded.components

    @property
    def weights(self) -> Residency:
        return self.loaded.weights

    @property
    def capabilities(self) -> Capabilities:
        return self.described

    @property
    def stats(self) -> StageStats:
        running = sum(job.opened > 0 for job in self.jobs.values())
        open_steps = sum(s.steps.done for job in self.jobs.values() for s in job.sessions.values())
        return msgspec.structs.replace(
            machine_stats(self.model, self.encoded, self.runner.step_cache, self.device),
            running=running,
            waiting=len(self.jobs) - running,
            steps=int(self.totals["steps"]) + open_steps,
            seconds={phase: seconds for phase, seconds in self.totals.items() if phase != "steps"},
            runs=self.runner.log.read(),
        )

    @property
    def busy(self) -> bool:
        return bool(self.jobs or self.events)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError; then the engine holds nothing of it."""
        if self.asleep:
            raise NotReadyError("the model is asleep")
        validate(request, self.described, self.config.limits)
        call_arguments(request, self.shape, self.family, self.sound)
        if request.request_id in self.jobs:
            raise refuse("request_id", request.request_id, "a request of this id is in flight")
        self.jobs[request.request_id] = Job(request, randomness_of(request), self._adapters(request.params.lora))

    def _adapters(self, asked: Sequence[LoRARequest]) -> AdapterSet:
        return self.loaded.adapters.use(asked, {name for job in self.jobs.values() for name, _ in job.adapters})

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
        for session in [s for job in self.jobs.values() for s in (*job.previews.values(), *job.sessions.values())]:
            self._advance(session)
        group = self.scheduler.next_group()
        try:
            self.runner.execute(group)
        finally:
            undone = [call for call in group if not call.done]  # an interrupt loses nobody's call
            self.scheduler.submit(undone + self.encoded.settle(group))
        self._deliver(idle=not group)
        for job in self.jobs.values():
            self._report(job)
        events, self.events = self.events, []
        return events

    def _advance(self, session: Session) -> None:
        """Run a session until it waits for a call or has ended."""
        while session.ready:
            session.resume()
            self._preview(session)  # its call goes before what the session waits for now
            self.scheduler.submit(self.encoded.ask(session.take_calls()))
        if session.finished:
            self._ended(session)

    def warm_up(self) -> None:
        """Make one small generation. Raises what it raised."""
        run_first_that_works(self, warmup_requests(self.described, self.family, self.shape))
        self.encoded.reset()

    def close(self) -> None:
        for job in list(self.jobs.values()):
            self._fail(job, RequestAbortedError("the engine was closed"))
        self.outputs.close()
        if self.model is not None:
            self.model.close()

    # Sleep: level 1 moves the weights to the host, level 2 drops the model and loads it again.

    def sleep(self, level: int) -> int:
        """Give the device's memory back; the bytes that others have of it. Only when the engine is not busy.

        Raises ConfigError, with everything in place, if the weights cannot be moved.
        """
        if self.busy or self.asleep:
            raise NotReadyError("the engine is busy" if self.busy else f"the engine sleeps, at level {self.asleep}")
        before = used_bytes(self.device)
        if level == 1:
            self.loaded.sleep()
        else:
            self.loaded.close()
            self.encoded.clear()
            self.model, self.runner.weights = None, InPlace()
            self.settings = replace(self.settings, components=())
        self.asleep = level
        release(self.device)
        return max(before - used_bytes(self.device), 0)

    def wake_up(self) -> None:
        """The opposite of `sleep`. Raises what loading raises, and OutOfMemoryError; then it sleeps on."""
        try:
            if self.asleep == 1:
                self.loaded.wake(self.device)
            elif self.asleep == 2:
                self.model = Model.load(self.config, self.device, self.given)
                self.runner.weights, self.runner.step_cache = self.weights, self.loaded.step_cache
                self.settings = replace(self.settings, components=self.components)
        except torch.OutOfMemoryError as error:
            release(self.device)
            raise OutOfMemoryError(f"there is no room to wake up: {error}") from None
        self.asleep = 0

    def _may_merge(self, call: Call) -> bool:
        component = call.component
        return (
            self.max_sessions > 1
            and component.role in self.family.merge
            and call.method in component.main
            and call.method != "encode"  # an autoencoder's encode returns a distribution: no batch axis to split
            and self.runner.may_merge(component.name)
        )

    # The life of a job: admitted (its sessions are opened), run, ended.

    def _admit(self) -> None:
        """Open sessions while there is room: of the request with the fewest open ones first, then of the oldest."""
        free = self.max_sessions - sum(len(job.sessions) for job in self.jobs.values())
        for _ in range(free):
            hungry = [job for job in self.jobs.values() if job.opened < job.count]
            if hungry:
                self._open(min(hungry, key=lambda job: (len(job.sessions), job.arrived)))

    def _open(self, job: Job) -> None:
        index = job.opened
        source = job.randomness[index]
        seed = source.seed if source.seed is not None else source.generator.initial_seed()
        session = Session(job.request.request_id, index, seed, self.settings, job.adapters)
        if job.request.partial_images:
            session.tap = Watch(session.steps, job.request.partial_images, self.device)
        elif self.family.streamed_decode and not self.shape.modular and job.streams:
            begin = partial(job.open_stream, self.outputs, index)
            session.tap = FrameTap(self.family.frames_multiple, self.outputs.chunk_bytes, begin)
        session.open(self.pipeline, lambda own: self._generate(own, job, index))
        job.opened += 1
        job.started = job.started or time.perf_counter()
        job.sessions[index] = session

    def _arguments(self, job: Job, generator: torch.Generator) -> dict[str, Any]:
        asked = call_arguments(job.request, self.shape, self.family, self.sound)
        arguments = self.config.model.diffusers_call_kwargs | asked
        return arguments | ({"generator": generator} if self.shape.takes("generator") else {})

    def _generate(self, pipeline: Any, job: Job, index: int) -> RawOutput:
        """In the session's coroutine: call the pipeline."""
        arguments = self._arguments(job, job.randomness[index].generator)
        as_pictures, tensors = job.request.params.output_type == "pil", arguments.get("output_type") == "pt"
        return raw_output(pipeline(**arguments), self.family.modality, as_pictures, tensors)

    def _preview(self, session: Session) -> None:
        """Begin to make a picture of what `session` predicts, unless the one before is not done."""
        if not isinstance(session.tap, Watch):
            return
        prediction, job = session.tap.take(), self.jobs[session.request_id]
        if prediction is None or session.finished or session.index in job.previews:
            return
        arguments = replay_arguments(self._arguments(job, job.randomness[session.index].again()), self.shape)
        tap = Replay(prediction)
        preview = Session(session.request_id, session.index, session.seed, self.settings, session.adapters, tap=tap)
        preview.open(self.pipeline, lambda own: media_of(raw_output(own(**arguments), self.family.modality, True)))
        job.previews[session.index] = preview
        self._advance(preview)

    def _previewed(self, job: Job, preview: Session) -> None:
        """A preview is done; that one could not be made is no fault of the request's."""
        assert isinstance(preview.tap, Replay)
        if preview.error is not None:
            log.warning("no preview: %s\n%s", type(preview.error).__name__, preview.where)
        else:
            step, media = preview.tap.prediction.step, preview.result
            self.events.append(Preview(job.request.request_id, preview.index, step, media))
        self._close(job, preview)

    def _ended(self, session: Session) -> None:
        job = self.jobs.get(session.request_id)
        if job is None:  # another output of the same request has failed and ended it
            return
        if session.company == Replay.company:
            if job.previews.get(session.index) is session:  # else its output was done before it
                self._previewed(job, session)
            return
        if session.error is not None:
            self._fail(job, as_polymux_error(session.error, session.where, computing=session.computing))
            return
        self._close(job, session)
        if job.end_stream(session.index):
            return
        raw, session.result = job.smoothed(session.result, self.loaded.between), None
        at_once = self.family.modality == "image"  # those are on the host already
        job.outbound[session.index] = self.outputs.send(session.request_id, session.index, raw, at_once)

    def _deliver(self, idle: bool) -> None:
        """Hand out what has come to the host of outputs. `idle`: there was nothing to run; then wait a moment."""
        waiting = [outbound for job in self.jobs.values() for outbound in job.outbound.values()]
        if not waiting:
            return
        said = len(self.events)
        for outbound in waiting:
            job = self.jobs.get(outbound.request_id)
            if job is None:  # another output of the same request has failed and ended it
                continue
            self.events += job.chunks_of(outbound)
            if outbound.empty:
                self._delivered(job, outbound)
        if idle and len(self.events) == said:
            self.outputs.wait(waiting, OUTPUT_POLL_S)

    def _delivered(self, job: Job, outbound: Outbound) -> None:
        try:
            job.outputs[outbound.output] = outbound.media.result()
        except Exception as error:  # conversion and copy are the request's own; others go on
            self._fail(job, as_polymux_error(error, drop_frames(error), computing=True))
            return
        del job.outbound[outbound.output]
        if job.complete:
            self._finish(job)

    def _close(self, job: Job, session: Session) -> None:
        """Of an output or a preview. The preview of an output ends with it."""
        self.scheduler.forget(session)
        self.runner.step_cache.forget(session)
        self.scheduler.submit(self.encoded.forget(session))
        session.cancel()
        before = dict(job.seconds)
        if session.company == Replay.company:
            job.close_preview(session)
        else:
            job.close(session)
            self.totals["steps"] += session.steps.done
            if session.index in job.previews:
                self._close(job, job.previews[session.index])
        for phase, seconds in job.seconds.items():
            self.totals[phase] += seconds - before.get(phase, 0.0)

    def _finish(self, job: Job) -> None:
        del self.jobs[job.request.request_id]
        self._report(job)
        made = self.family.modality
        fps = job.request.params.fps or self.described.fps if made == "video" else None
        self.events.append(job.finished(made, fps, self.described.sample_rate))

    def _report(self, job: Job) -> None:
        progress = job.progress()
        if progress is not None:
            self.events.append(progress)

    def _fail(self, job: Job, error: PolymuxError) -> None:
        del self.jobs[job.request.request_id]
        for session in list(job.sessions.values()):
            self._close(job, session)
        for outbound in job.outbound.values():
            outbound.drop()
        self.events.append(Failed(job.request.request_id, error.info()))

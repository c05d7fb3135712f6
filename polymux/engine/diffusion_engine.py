"""The engine of a diffusion stage.

A step: let every session that can go on run until it needs a component, choose the calls to run, run them as one.
Knows requests, their sessions and the queue between them; not what a pipeline computes, and nothing of processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.diffusion.component import SUBMODULE_DEPTH, Component
from polymux.diffusion.encoder_cache import EncoderCache
from polymux.diffusion.frame_stream import FrameTap
from polymux.diffusion.merging import Merger
from polymux.diffusion.outputs import RawOutput, media_of, raw_output
from polymux.diffusion.own_copy import own_copy
from polymux.diffusion.pipeline_call import CallShape, call_arguments, describe, replay_arguments
from polymux.diffusion.preview import Replay, Watch
from polymux.diffusion.rates import SoundShape
from polymux.diffusion.replica import replica
from polymux.diffusion.runner import InPlace, Plainly, Runner
from polymux.diffusion.session import Session
from polymux.diffusion.step_scheduler import Scheduler, StepScheduler
from polymux.diffusion.tracebacks import drop_frames
from polymux.diffusion.tuned import AdapterSet
from polymux.engine.base import StageEngine
from polymux.engine.cache_counts import cache_counts
from polymux.engine.failure import as_polymux_error
from polymux.engine.guidance import divide_guidance
from polymux.engine.job import Job, randomness_of
from polymux.engine.model import Model
from polymux.engine.outbound import Outbound, Outputs, OutputThread
from polymux.engine.session_engine import SessionEngine, prepare_device
from polymux.engine.warmup import run_first_that_works, run_merged, warmup_requests
from polymux.memory.residency import Residency
from polymux.parallel.mesh import ALONE, Mesh
from polymux.request import LoRARequest, Preview, Request, StageStats

log = logging.getLogger(__name__)

OUTPUT_POLL_S = 0.002  # for messages, while outputs are all that there is to do


class DiffusionEngine(SessionEngine[Job, Model]):
    """Implements `engine.base.StageEngine` for any diffusers pipeline."""

    @classmethod
    def load(
        cls, config: EngineConfig, components: dict[str, object] | None = None, mesh: Mesh = ALONE
    ) -> DiffusionEngine:
        """Load the model; `components`: parts that the checkpoint lacks; `mesh`: this rank's place among others. Raises
        CheckpointError, ConfigError."""
        device = prepare_device(config)
        given = dict(components or {})
        model = Model.load(config, device, given, mesh)
        return cls(config, model.pipeline, device, model=model, given=given, mesh=mesh)

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Any,
        device: torch.device,
        *,
        model: Model | None = None,
        given: dict[str, object] | None = None,
        mesh: Mesh = ALONE,
    ) -> None:
        """An engine for a pipeline that is loaded already, with its modules on the host or on `device`. `model` is what
        has been made of it, if it has; `given` are the parts that its checkpoint lacks; `mesh`: this rank's place."""
        made = model or Model.of(config, pipeline, device, mesh=mesh)
        self.mesh = mesh
        self.family, self.given = made.family, given or {}
        self.shape, self.sound = CallShape.of(pipeline, self.family.modality), SoundShape.of(pipeline)
        described = msgspec.structs.replace(
            describe(pipeline, self.family, self.shape),
            storage=made.weights.describe(),
            frame_interpolation=made.between is not None,
        )
        # What a pipeline that nobody has looked at does to its components in a call might reach other requests.
        alone = config.scheduler.max_num_seqs == 1 or not self.family.pipelines
        divided = mesh.degree("cfg") > 1
        collect = self.family.collect_guidance and bool(self.family.pipelines) and (divided or not alone)
        super().__init__(config, device, made, described, collect)
        if alone and self.max_sessions > 1:
            log.warning("%s is of no family that polymux knows: one request at a time", type(pipeline).__name__)
            self.max_sessions = 1
        merger = Merger(self.family.padding, self.family.shared)
        self.runner = Runner(merger, self.device, self.weights, made.step_cache, made.attention)
        self.runner.way = made.graphs or Plainly()
        self.step_cache = made.step_cache
        self.encoded = EncoderCache(config.caches.prompt_bytes if self.family.pipelines else 0, merger.contents)
        self.split = divide_guidance(self.runner, self.family, config, mesh)
        self.scheduler: Scheduler = StepScheduler(
            config.scheduler.max_batched_tokens * mesh.degree("cfg"),
            self._may_merge,
            merger.key,
            merger.tokens,
            ready=lambda call: self.weights.ready(call.component.name),
        )
        self.outputs: Outputs = OutputThread(self.device, config.process.output_chunk_bytes)
        made.adapters.check_standing()

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
    def stats(self) -> StageStats:
        model = self.model
        queries, hits = cache_counts(model, self.encoded, self.step_cache)
        return msgspec.structs.replace(
            super().stats,
            offload_bytes=dict(model.weights.moved) if model else {},
            offload_late=model.weights.late if model else {},
            cache_queries=queries,
            cache_hits=hits,
        )

    def _job_of(self, request: Request) -> Job:
        call_arguments(request, self.shape, self.family, self.sound)
        return Job(request, randomness_of(request), self._adapters(request.params.lora))

    def _adapters(self, asked: Sequence[LoRARequest]) -> AdapterSet:
        return self.loaded.adapters.use(asked, {name for job in self.jobs.values() for name, _ in job.adapters})

    def _execute(self, group: list[Call]) -> None:
        (self.split or self.runner).execute(group)

    def _unanswered(self, group: list[Call]) -> list[Call]:
        return super()._unanswered(group) + self.encoded.settle(group)

    def _advance(self, session: Session) -> None:
        """Run a session until it waits for a call or has ended."""
        while session.ready:
            session.resume()
            self._preview(session)  # its call goes before what the session waits for now
            self.scheduler.submit(self.encoded.ask(session.take_calls()))
        if session.finished:
            self._ended(session)

    def warm_up(self, through: StageEngine | None = None) -> None:
        """Make one small generation; `through`: whoever has this engine make its steps. Raises what it raised."""
        request = run_first_that_works(through or self, warmup_requests(self.described, self.family, self.shape))
        if self.loaded.compiled.used and self.max_sessions > 1:
            run_merged(through or self, request)
        self.forget_warm_up()

    def forget_warm_up(self) -> None:
        self.encoded.reset()

    def _stop(self) -> None:
        self.outputs.close()

    def _load_again(self) -> Model:
        return Model.load(self.config, self.device, self.given, self.mesh)

    def _use(self, components: Sequence[Component]) -> None:
        super()._use(components)
        if self.model is None:
            self.encoded.clear()
            self.runner.weights, self.runner.way = InPlace(), Plainly()
        else:
            self.step_cache = self.loaded.step_cache
            self.runner.weights, self.runner.step_cache = self.weights, self.step_cache
            self.runner.attention = self.loaded.attention
            self.runner.way = self.loaded.graphs or Plainly()

    def _may_merge(self, call: Call) -> bool:
        component = call.component
        return (
            self.max_sessions > 1
            and component.role in self.family.merge
            and call.method in component.main
            and call.method != "encode"  # an autoencoder's encode returns a distribution: no batch axis to split
            and self.runner.may_merge(component.name)
        )

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
        session.open(self.pipeline, lambda own: self._generate(own, job, index), own_copy)
        job.opened += 1
        job.started = job.started or time.perf_counter()
        job.sessions[index] = session

    def _arguments(self, job: Job, generator: torch.Generator) -> dict[str, Any]:
        asked = call_arguments(job.request, self.shape, self.family, self.sound)
        arguments = self.config.model.diffusers_call_kwargs | asked
        return arguments | ({"generator": generator} if self.shape.takes("generator") else {})

    def _generate(self, pipeline: Any, job: Job, index: int) -> RawOutput:
        """In the session's coroutine: call the pipeline."""
        for name, _ in self.family.loops:
            pipeline.__dict__[name] = replica(pipeline.__dict__[name], SUBMODULE_DEPTH)
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
        made = self.family.modality
        preview.open(self.pipeline, lambda own: media_of(raw_output(own(**arguments), made, True)), own_copy)
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
            error, unusable = session.error, self.family.unusable
            self._fail(job, as_polymux_error(error, session.where, session.computing, job.request, unusable))
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

    def _forget(self, session: Session) -> None:
        super()._forget(session)
        self.step_cache.forget(session)
        self.scheduler.submit(self.encoded.forget(session))

    def _close(self, job: Job, session: Session) -> None:
        """Of an output or a preview. The preview of an output ends with it."""
        super()._close(job, session)
        if session.company != Replay.company and session.index in job.previews:
            self._close(job, job.previews[session.index])

    def _finish(self, job: Job) -> None:
        del self.jobs[job.request.request_id]
        self._report(job)
        made = self.family.modality
        fps = job.request.params.fps or self.described.fps if made == "video" else None
        self.events.append(job.finished(made, fps, self.described.sample_rate))

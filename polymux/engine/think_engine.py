"""The engine of a stage that answers with text, and hands on what has to be known to speak it.

As the engine of a whole model that answers, up to what becomes of the result. A request that is not to be spoken ends
here, and no other stage hears of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polymux.config import EngineConfig
from polymux.connector import make_connector
from polymux.diffusion.session import Session
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.chat_job import ChatJob, PreparedJob
from polymux.engine.generate_model import GenerateModel
from polymux.engine.travel import packed, random_now
from polymux.errors import PolymuxError
from polymux.families.chat import ChatCall, Hooks
from polymux.families.generate import Parts
from polymux.families.graph import Arrays, Edge
from polymux.parcel import Chunk
from polymux.request import Finished, Modality, Request


@dataclass(kw_only=True, eq=False)
class ThinkJob(ChatJob):
    thoughts: Arrays | None = None  # that have not left yet

    @property
    def complete(self) -> bool:
        return self.done and self.thoughts is None

    def drop(self) -> None:
        super().drop()
        self.thoughts = None

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        """The text, seed and work are told; the sound is the last stage's."""
        return super().finished(modality, fps, None)


class ThinkEngine(ChatEngine):
    """Implements `engine.base.StageEngine` for the first stage of a graph that thinks."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        assert self.family.graph is not None
        self._edge: Edge = self.family.graph.out_of(config.stage)
        self._connector = make_connector(config.stages)

    def warm_up(self) -> None:
        super().warm_up()
        self._connector.forget("warm-up")

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._connector.forget(request_id)  # also if the request has ended here, and not in the next stage

    def taken(self, request_id: str) -> None:
        self._connector.taken(request_id)

    def close(self) -> None:
        super().close()
        self._connector.close()

    def _job_of(self, request: Request) -> ThinkJob:
        job = super()._job_of(request)
        assert isinstance(job, ChatJob)
        return ThinkJob(request=request, randomness=job.randomness, writer=job.writer, preparing=job.preparing)

    def _answer(self, job: ChatJob, own: Parts, call: ChatCall, hooks: Hooks) -> Arrays | None:
        thoughts = self.family.adapter.think(own, call, hooks)
        job.writer.end()
        if thoughts is None:
            return None
        return {**packed(thoughts), **(random_now(self.device) if self._edge.random else {})}

    def _done(self, job: PreparedJob, session: Session, result: Arrays | None) -> None:
        assert isinstance(job, ThinkJob)
        job.thoughts, job.done = result, True

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            assert isinstance(job, ThinkJob)
            if job.thoughts is None:
                continue
            self.events += job.pieces()  # the text first
            name = job.request.request_id
            try:
                parcel = self._connector.put(name, job.thoughts)
            except PolymuxError as error:
                self._fail(job, error)
                continue
            job.thoughts = None
            self.events.append(Chunk(name, 0, parcel, ends_part=True, last=True))
        super()._deliver(idle)

    def _fail(self, job: PreparedJob, error: PolymuxError) -> None:
        super()._fail(job, error)
        self._connector.forget(job.request.request_id)

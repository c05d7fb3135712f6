"""The engine of a stage that writes: a model's own loop, whose steps are handed on to the next stage as they are made.

As the engine of a whole model, up to what becomes of the result: a session's rows go out in chunks, of so many steps as
the graph says or of whole sentences, and the request ends when the last one is out. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.connector import Tensors, make_connector
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.generate_model import GenerateModel
from polymux.engine.outbound import WINDOW
from polymux.engine.sound_job import SoundJob
from polymux.errors import PolymuxError
from polymux.families.generate import Parts
from polymux.families.graph import Graph
from polymux.parcel import Chunk
from polymux.request import Finished, Modality, Request


@dataclass(eq=False)
class WriteJob(SoundJob):
    """Part i of the job is what is written of sentence i."""

    rows: dict[int, deque[Tensors]] = field(default_factory=dict)  # of parts that are not all out
    written: set[int] = field(default_factory=set)  # parts of which no more comes


class WriteEngine(GenerateEngine):
    """Implements `engine.base.StageEngine` for the first stage of a declared graph."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        assert isinstance(self.family.graph, Graph)
        self._connector = make_connector(config.stages)
        self._rows = self.family.graph.chunk if config.stages.async_chunk else None

    def warm_up(self) -> None:
        super().warm_up()
        self._connector.forget("warm-up")

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._connector.forget(request_id)  # also if the request has ended here, and not in the next stage

    def taken(self, request_id: str) -> None:
        super().taken(request_id)
        self._connector.taken(request_id)

    def close(self) -> None:
        super().close()
        self._connector.close()

    def _job_of(self, request: Request) -> WriteJob:
        job = super()._job_of(request)
        return WriteJob(job.request, job.randomness, params=job.params, calls=job.calls)

    def _run(self, job: SoundJob, index: int, own: Parts) -> None:
        assert isinstance(job, WriteJob)
        rows = job.rows[index] = deque()
        self.family.adapter.write(own, job.calls[index], rows.append)

    def _made(self, job: SoundJob, index: int, result: Any) -> None:
        assert isinstance(job, WriteJob)
        job.written.add(index)

    def _deliver(self, idle: bool) -> None:
        for job in list(self.jobs.values()):
            assert isinstance(job, WriteJob)
            try:
                while (chunk := self._next_chunk(job)) is not None:
                    self.events.append(chunk)
            except PolymuxError as error:
                self._fail(job, error)
                continue
            self._report(job)
            if job.complete:
                del self.jobs[job.request.request_id]
                self.events.append(_ended(job, self.family.modality))
        if idle and not self.events and self.jobs:
            self._idle()

    def _next_chunk(self, job: WriteJob) -> Chunk | None:
        """What may be sent now; it counts as under way. A sentence is handed on to its end before the next one."""
        part = job.out
        ends = part in job.written
        rows = job.rows.get(part)
        if rows is None or job.under_way >= WINDOW or not (ends or (self._rows and len(rows) >= self._rows)):
            return None
        taken = [rows.popleft() for _ in range(min(len(rows), self._rows or len(rows)))]
        ends = ends and not rows
        parcel = self._connector.put(job.request.request_id, joined(taken))
        job.under_way += 1
        if ends:
            del job.rows[part]
            job.out += 1
        return Chunk(job.request.request_id, part, parcel, ends, job.complete)

    def _fail(self, job: SoundJob, error: PolymuxError) -> None:
        super()._fail(job, error)
        self._connector.forget(job.request.request_id)


def joined(rows: list[Tensors]) -> Tensors:
    """Rows one after the other; what is no row (0 or 1 dimensions) is the same in all of them."""
    if not rows:
        return {}
    return {
        name: np.concatenate([row[name] for row in rows]) if first.ndim > 1 else first
        for name, first in rows[0].items()
    }


def _ended(job: WriteJob, modality: Modality) -> Finished:
    """The output is the last stage's; seed and work are told."""
    return Finished(
        request_id=job.request.request_id,
        modality=modality,
        outputs=[],
        seeds=[job.randomness[0].seed],
        metrics=job.metrics(),
    )

"""The engine of a stage whose answers go on together, and that hands on what has to be known to speak them.

As the engine of language models, up to what becomes of an answer that is to be spoken. One that is not ends here, and
no other stage hears of it.
"""

from __future__ import annotations

import torch

from polymux.ar.sequence import Sequence
from polymux.config import EngineConfig
from polymux.connector import make_connector
from polymux.diffusion.tracebacks import drop_frames
from polymux.engine.ar_engine import ArEngine
from polymux.engine.ar_job import ArJob
from polymux.engine.ar_state import ArState
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_model import GenerateModel
from polymux.engine.travel import packed, random_of
from polymux.errors import PolymuxError
from polymux.families.graph import Edge
from polymux.parcel import Chunk


class ArThinkEngine(ArEngine):
    """Implements `engine.base.StageEngine` for the first stage of a graph that thinks."""

    def __init__(
        self, config: EngineConfig, model: GenerateModel, device: torch.device, ahead: bool | None = None
    ) -> None:
        graph = model.family.graph
        assert graph is not None
        self._edge: Edge = graph.out_of(config.stage)
        self._connector = make_connector(config.stages)
        super().__init__(config, model, device, ahead)

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

    def _complete(self, state: ArState, job: ArJob, sequence: Sequence) -> None:
        if sequence.heard is not None:
            name = job.request.request_id
            try:
                random = random_of(job.seed, self._device) if self._edge.random else {}
                parcel = self._connector.put(name, {**packed(self._thoughts(state, job, sequence)), **random})
            except Exception as error:  # whatever the model raises is the end of this request
                self._fail(job, as_polymux_error(error, drop_frames(error), computing=True))
                return
            self._events.append(Chunk(name, 0, parcel, ends_part=True, last=True))
        super()._complete(state, job, sequence)

    def _fail(self, job: ArJob, error: PolymuxError) -> None:
        super()._fail(job, error)
        self._connector.forget(job.request.request_id)

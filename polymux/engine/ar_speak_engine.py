"""The engine of a whole model whose answers go on together, and that speaks them.

As the engine of language models up to the end of an answer's text. If it is to be spoken, the rest of the model speaks
it in a session, as in an engine in which each answer is one: beside this one, in the same steps.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from polymux.ar.sequence import Sequence
from polymux.config import EngineConfig
from polymux.diffusion.tracebacks import drop_frames
from polymux.engine.ar_engine import ArEngine
from polymux.engine.ar_job import ArJob
from polymux.engine.ar_state import ArState
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.chat_job import ChatJob
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_engine import sound_of
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import Randomness
from polymux.errors import RequestAbortedError
from polymux.families.chat import ChatCall, Hooks, Tensors
from polymux.families.generate import Parts
from polymux.request import Event, Request, StageStats
from polymux.validation import refuse


@dataclass(kw_only=True, eq=False)
class SpeechJob(ChatJob):
    thoughts: Tensors


class SpeechEngine(ChatEngine):
    """What speaks: answers come with their text. The model is somebody else's."""

    patient = True  # whether there is nothing else to do in a step

    def take_over(self, job: ArJob, call: ChatCall, thoughts: Tensors) -> None:
        mine = SpeechJob(
            request=job.request,
            randomness=[Randomness(job.seed, torch.Generator().manual_seed(job.seed))],
            writer=job.writer,
            preparing=Future(),
            call=call,
            thoughts=thoughts,
            arrived=job.arrived,
            started=job.started,
            seconds={"encode": job.reading, "denoise": job.seconds},
            steps_done=len(job.writer.tokens),
        )
        self.jobs[job.request.request_id] = mine

    def use(self, model: GenerateModel | None) -> None:
        """The model has come, or has gone."""
        self.model = model
        self._use(() if model is None else model.components)

    def end(self) -> None:
        for job in list(self.jobs.values()):
            self._fail(job, RequestAbortedError("the engine was closed"))
        self._stop()

    def _answer(self, job: ChatJob, own: Parts, call: ChatCall, hooks: Hooks) -> Any:
        assert isinstance(job, SpeechJob)
        thoughts, job.thoughts = job.thoughts, {}
        return sound_of(self.family.adapter.speak_thoughts(own, call, thoughts))

    def _idle(self) -> None:
        if self.patient:
            super()._idle()
        else:
            self._pulse(self.jobs.values())


class ArSpeakEngine(ArEngine):
    """Implements `engine.base.StageEngine`."""

    def __init__(
        self, config: EngineConfig, model: GenerateModel, device: torch.device, ahead: bool | None = None
    ) -> None:
        self._speech = SpeechEngine(config, model, device)
        super().__init__(config, model, device, ahead)

    @property
    def stats(self) -> StageStats:
        text, speech = super().stats, self._speech.stats
        seconds = {phase: text.seconds.get(phase, 0.0) + more for phase, more in speech.seconds.items()}
        return msgspec.structs.replace(
            text,
            running=text.running + speech.running,
            waiting=text.waiting + speech.waiting,
            steps=text.steps + speech.steps,
            seconds=text.seconds | seconds,
            runs=[*text.runs, *speech.runs],
        )

    @property
    def busy(self) -> bool:
        return super().busy or self._speech.busy

    def add(self, request: Request) -> None:
        if request.request_id in self._speech.jobs:
            raise refuse("request_id", request.request_id, "a request of this id is in flight")
        super().add(request)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._speech.abort(request_id)

    def taken(self, request_id: str) -> None:
        self._speech.taken(request_id)

    def step(self) -> list[Event]:
        self._waits = not self._speech.busy
        events = super().step()
        if self._speech.busy:
            self._speech.patient = not events and not self._jobs
            events += self._speech.step()
        return events

    def sleep(self, level: int) -> int:
        freed = super().sleep(level)
        if self._model is None:
            self._speech.use(None)
        return freed

    def close(self) -> None:
        self._speech.end()
        super().close()

    def _take_in(self, model: GenerateModel) -> None:
        super()._take_in(model)
        self._speech.use(model)

    def _complete(self, state: ArState, job: ArJob, sequence: Sequence) -> None:
        if sequence.heard is None:
            super()._complete(state, job, sequence)
            return
        assert job.call is not None
        try:
            thoughts = self._thoughts(state, job, sequence)
        except Exception as error:  # whatever the model raises is the end of this request
            self._fail(job, as_polymux_error(error, drop_frames(error), computing=True))
            return
        self._end(job)
        self._speech.take_over(job, job.call, {name: one.to(self._device) for name, one in thoughts.items()})

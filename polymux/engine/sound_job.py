"""A request for sound in the engine: its sentences, each made by a session of its own, and handed out in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from polymux.diffusion.call import Call as ComponentCall
from polymux.diffusion.call import Tap
from polymux.diffusion.progress import StepCounter
from polymux.engine.job import Job
from polymux.engine.outbound import WINDOW
from polymux.families.generate import Call
from polymux.request import ArrayData, Finished, Modality, RequestMetrics, SamplingParams, SoundPiece

AHEAD = 8  # sentences that are made before their turn; more would fill memory if the client is slow


@dataclass(eq=False)
class SoundJob(Job):
    """Output i of the job is the sound of sentence i."""

    params: SamplingParams = SamplingParams()
    calls: list[Call] = field(default_factory=list)  # one for each sentence
    made: dict[int, deque[ArrayData]] = field(default_factory=dict)  # sounds that are not all out, in parts
    whole: set[int] = field(default_factory=set)  # sentences that are made to their end
    out: int = 0  # sentences that are
    seconds_made: float = 0.0

    def metrics(self) -> RequestMetrics:
        masks = [call.arguments["attention_mask"] for call in self.calls]
        return msgspec.structs.replace(super().metrics(), text_tokens=sum(int(mask.sum()) for mask in masks))

    @property
    def hungry(self) -> bool:
        """Whether another sentence may begin. One at a time: where calls are not merged, a second one would only delay
        the first, for which somebody waits."""
        return not self.sessions and self.opened < min(self.count, self.out + AHEAD)

    @property
    def complete(self) -> bool:
        return self.out == self.count

    def pieces(self) -> list[SoundPiece]:
        """What may be sent now; it counts as under way."""
        ready: list[SoundPiece] = []
        while self.out in self.made and self.under_way < WINDOW:
            parts = self.made[self.out]
            if parts:
                ready.append(SoundPiece(self.request.request_id, self.out, parts.popleft()))
                self.under_way += 1
            elif self.out not in self.whole:
                break
            if not parts and self.out in self.whole:
                del self.made[self.out]
                self.out += 1
        return ready

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        return Finished(
            request_id=self.request.request_id,
            modality=modality,
            outputs=[[]],
            seeds=[self.randomness[0].seed],
            metrics=self.metrics(),
            sample_rate=sample_rate,
            sound_seconds=self.seconds_made,
            profile=self.profile(),
        )


class StepTap(Tap):
    """Counts the calls that are a session's steps."""

    def __init__(self, paths: tuple[str, ...], counter: StepCounter) -> None:
        self._paths, self._counter = paths, counter

    def note(self, call: ComponentCall, result: object) -> None:
        if f"{call.component.name}.{call.method}" in self._paths:
            self._counter.done += 1

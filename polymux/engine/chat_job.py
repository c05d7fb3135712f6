"""A request for an answer in the engine: prepared in a thread, written by one session, and handed out as it comes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from polymux.diffusion.call import Call as ComponentCall
from polymux.diffusion.call import Tap
from polymux.diffusion.progress import StepCounter
from polymux.engine.job import Job
from polymux.engine.outbound import WINDOW
from polymux.engine.writing import Writer
from polymux.families.chat import ChatCall
from polymux.request import ArrayData, Finished, FinishReason, Modality, Progress, RequestMetrics, SoundPiece, TextPiece


@dataclass(kw_only=True, eq=False)
class PreparedJob(Job):
    """A request whose arguments are made in a thread; no session of it begins before they are there."""

    preparing: Future[Any]
    call: Any = None

    def drop(self) -> None:
        self.preparing.cancel()
        super().drop()

    def pieces(self) -> list[TextPiece | SoundPiece]:
        """What may be sent now; sound counts as under way."""
        return []


@dataclass(kw_only=True, eq=False)
class ChatJob(PreparedJob):
    """Text goes out as it is written, at once: there is never much of it. Sound comes after it, in parts."""

    writer: Writer
    preparing: Future[ChatCall]
    call: ChatCall | None = None
    speech: StepCounter = field(default_factory=StepCounter)
    sound: deque[ArrayData] = field(default_factory=deque)
    seconds_made: float = 0.0
    done: bool = False  # the model has returned
    text_sent: bool = False  # since the last report

    @property
    def hungry(self) -> bool:
        return self.call is not None and not self.opened

    @property
    def complete(self) -> bool:
        return self.done and not self.sound

    def drop(self) -> None:
        super().drop()
        self.sound.clear()

    def pieces(self) -> list[TextPiece | SoundPiece]:
        ready: list[TextPiece | SoundPiece] = []
        if text := self.writer.take():
            ready.append(TextPiece(self.request.request_id, text))
            self.text_sent = True
        while self.done and self.sound and self.under_way < WINDOW:
            ready.append(SoundPiece(self.request.request_id, 0, self.sound.popleft()))
            self.under_way += 1
        return ready

    def progress(self) -> Progress | None:
        """Nothing until it is certain that the model takes the request; and text is news enough."""
        if self.call is None or self.text_sent:
            self.text_sent = False
            return None
        return super().progress()

    def metrics(self) -> RequestMetrics:
        prompt = 0 if self.call is None else self.call.prompt_tokens
        return msgspec.structs.replace(
            super().metrics(),
            prompt_tokens=prompt,
            completion_tokens=len(self.writer.tokens),
            audio_tokens=self.speech.done,
        )

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        return Finished(
            request_id=self.request.request_id,
            modality=modality,
            outputs=[[]],
            seeds=[self.randomness[0].seed],
            metrics=self.metrics(),
            sample_rate=sample_rate if self.seconds_made else None,
            sound_seconds=self.seconds_made,
            text=self.writer.text,
            finish_reason=self._reason(),
            profile=self.profile(),
        )

    def _reason(self) -> FinishReason:
        assert self.call is not None
        tokens = self.writer.tokens
        ended = self.writer.stopped or len(tokens) < self.call.steps or tokens[-1] in self.call.ends
        spoken = self.call.speech_steps is None or self.speech.done < self.call.speech_steps
        return "stop" if ended and spoken else "length"


class ChatTap(Tap):
    """Counts the calls that are a session's steps, and among them those of its speech."""

    def __init__(self, steps: tuple[str, ...], speech: tuple[str, ...], counter: StepCounter, spoken: StepCounter):
        self._steps, self._speech, self._counter, self._spoken = steps, speech, counter, spoken

    def note(self, call: ComponentCall, result: object) -> None:
        path = f"{call.component.name}.{call.method}"
        if path in self._steps:
            self._counter.done += 1
        if path in self._speech:
            self._spoken.done += 1

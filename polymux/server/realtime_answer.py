"""One response of a realtime session: from what a model writes and speaks to events. Knows no sockets.

What was written goes into the item of the conversation as it comes, so it stays there however the response ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator

from polymux.errors import GenerationError, PolymuxError, RequestAbortedError
from polymux.media.sample_stream import SampleStream
from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput, samples_of
from polymux.request import SoundPiece, TextPiece
from polymux.server.errors import error_body
from polymux.server.realtime_conversation import Item
from polymux.server.realtime_events import (
    AnswerAudio,
    AudioDone,
    AudioPart,
    Delta,
    FailureView,
    ItemEvent,
    OutputItemEvent,
    OutputTokens,
    PartEvent,
    Place,
    Reason,
    ResponseEvent,
    ResponseView,
    ServerEvent,
    Status,
    StatusDetails,
    TextDone,
    TextPart,
    TranscriptDone,
    Usage,
    new_id,
)
from polymux.server.realtime_manner import Manner
from polymux.server.realtime_protocol import RATE

_DELTA = RATE  # bytes: half a second


class Answer:
    """`item` is that of the conversation, and the last one in it; `previous_id` the one before."""

    def __init__(self, manner: Manner, conversation_id: str, item: Item, previous_id: str | None) -> None:
        self.id = new_id("resp")
        self._manner, self._conversation_id = manner, conversation_id
        self._item, self._previous_id = item, previous_id
        self._sound: SampleStream | None = None
        self._stopped: Reason | None = None
        self._status: Status = "in_progress"
        self._details: StatusDetails | None = None
        self._output: OmniRequestOutput | None = None

    def stop(self, reason: Reason) -> None:
        """No more of it is sent. Whoever makes it is to be told, too."""
        self._stopped = self._stopped or reason

    async def events(self, source: AsyncGenerator[Streamed]) -> AsyncGenerator[ServerEvent]:
        """From response.created to response.done, whatever happens to `source`, which is closed."""
        for event in self._opening():
            yield event
        try:
            async with contextlib.aclosing(source), contextlib.aclosing(self._deltas(source)) as deltas:
                async for delta in deltas:
                    yield delta
            self._end()
        except PolymuxError as error:
            self._fail(error)
        for event in self._closing():
            yield event

    async def _deltas(self, source: AsyncGenerator[Streamed]) -> AsyncGenerator[ServerEvent]:
        async for event in source:
            if self._stopped is not None:
                return
            if isinstance(event, TextPiece):
                self._item.parts = [self._text + event.text]
                yield self._delta(event.text)
            elif isinstance(event, SoundPiece):
                async for heard in self._heard(await asyncio.to_thread(self._samples, event)):
                    yield heard
            elif isinstance(event, OmniRequestOutput):
                self._output = event
                if self._sound is not None:
                    async for heard in self._heard(await asyncio.to_thread(self._sound.finish)):
                        yield heard
                return

    async def _heard(self, data: bytes) -> AsyncGenerator[ServerEvent]:
        for start in range(0, len(data), _DELTA):
            if self._stopped is not None:
                return
            delta = base64.b64encode(data[start : start + _DELTA]).decode()
            yield Delta(type="response.output_audio.delta", delta=delta, **self._place)

    def _samples(self, piece: SoundPiece) -> bytes:
        if self._sound is None:
            self._sound = SampleStream(piece.samples.sample_rate or 0, RATE)
        return self._sound.add(samples_of(piece))

    def _delta(self, text: str) -> ServerEvent:
        if self._manner.spoken:
            return Delta(type="response.output_audio_transcript.delta", delta=text, **self._place)
        return Delta(type="response.output_text.delta", delta=text, **self._place)

    def _end(self) -> None:
        if self._stopped is not None and (self._output is None or self._manner.spoken):
            self._close("cancelled", StatusDetails(type="cancelled", reason=self._stopped))
        elif self._output is None:
            self._fail(GenerationError("the generation ended without an output"))
        elif self._manner.spoken and self._sound is None:
            self._fail(GenerationError("the model made no sound"))
        elif self._output.finish_reason[0] == "length":
            self._close("incomplete", StatusDetails(type="incomplete", reason="max_output_tokens"))
        else:
            self._close("completed", None)

    def _fail(self, error: PolymuxError) -> None:
        if self._stopped is not None and isinstance(error, RequestAbortedError):
            self._close("cancelled", StatusDetails(type="cancelled", reason=self._stopped))
            return
        told = error_body(error).error
        failure = FailureView(type=told.type, code=told.code, message=told.message)
        self._close("failed", StatusDetails(type="failed", error=failure))

    def _close(self, status: Status, details: StatusDetails | None) -> None:
        self._status, self._details = status, details
        self._item.status = "completed" if status == "completed" else "incomplete"

    def _opening(self) -> list[ServerEvent]:
        part = AudioPart() if self._manner.spoken else TextPart()
        item = self._item.view().model_copy(update={"content": []})
        return [
            ResponseEvent(type="response.created", response=self._view()),
            OutputItemEvent(type="response.output_item.added", response_id=self.id, item=item),
            ItemEvent(type="conversation.item.added", previous_item_id=self._previous_id, item=item),
            PartEvent(type="response.content_part.added", part=part, **self._place),
        ]

    def _closing(self) -> list[ServerEvent]:
        text, item = self._text, self._item.view()
        done: list[ServerEvent]
        if self._manner.spoken:
            done = [AudioDone(**self._place), TranscriptDone(transcript=text, **self._place)]
        else:
            done = [TextDone(text=text, **self._place)]
        part = AudioPart(transcript=text) if self._manner.spoken else TextPart(text=text)
        return [
            *done,
            PartEvent(type="response.content_part.done", part=part, **self._place),
            OutputItemEvent(type="response.output_item.done", response_id=self.id, item=item),
            ItemEvent(type="conversation.item.done", previous_item_id=self._previous_id, item=item),
            ResponseEvent(type="response.done", response=self._view()),
        ]

    def _view(self) -> ResponseView:
        output = self._output if self._status in ("completed", "incomplete") else None
        return ResponseView(
            id=self.id,
            status=self._status,
            status_details=self._details,
            output=[] if self._status == "in_progress" else [self._item.view()],
            conversation_id=self._conversation_id,
            output_modalities=self._manner.modalities,
            max_output_tokens=self._manner.most_tokens,
            audio=AnswerAudio(output=self._manner.output),
            usage=None if output is None else _usage_of(output),
            seed=None if output is None else output.seeds[0],
        )

    @property
    def _text(self) -> str:
        (text,) = self._item.parts
        assert isinstance(text, str)
        return text

    @property
    def _place(self) -> Place:
        return {"response_id": self.id, "item_id": self._item.id}


def _usage_of(output: OmniRequestOutput) -> Usage:
    spent = output.metrics
    made = spent.completion_tokens + spent.audio_tokens
    return Usage(
        total_tokens=spent.prompt_tokens + made,
        input_tokens=spent.prompt_tokens,
        output_tokens=made,
        output_token_details=OutputTokens(text_tokens=spent.completion_tokens, audio_tokens=spent.audio_tokens),
    )

"""One session of WS /v1/realtime: a conversation by voice or text, one response at a time.

What comes in changes the session or asks for a response; `work` makes the responses. Somebody who begins to speak ends
the response that is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from typing import ClassVar

from fastapi import WebSocket
from pydantic import BaseModel

from polymux.errors import InvalidRequestError, PolymuxError
from polymux.media.wire import Array
from polymux.request import Capabilities
from polymux.server.errors import error_body
from polymux.server.log import note
from polymux.server.protocol import Body
from polymux.server.realtime_answer import Answer
from polymux.server.realtime_conversation import Conversation, Item
from polymux.server.realtime_events import (
    AudioView,
    BufferCleared,
    BufferCommitted,
    ErrorEvent,
    InputView,
    ItemDeleted,
    ItemEvent,
    RealtimeError,
    Reason,
    ResponseEvent,
    SessionEvent,
    SessionView,
    SpeechStarted,
    SpeechStopped,
    new_id,
)
from polymux.server.realtime_input import InputSound, milliseconds, samples_in
from polymux.server.realtime_manner import Manner, Where, in_words_of
from polymux.server.realtime_protocol import (
    MESSAGES,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ItemCreate,
    ItemDelete,
    ResponseCancel,
    ResponseCreate,
    ServerVad,
    SessionUpdate,
    SoundInput,
)
from polymux.server.session import session_of
from polymux.server.socket_session import SocketSession
from polymux.server.state import ServerState


@dataclass(frozen=True)
class _Asked:
    """A response that is to be made; `where` says whose fields say how, `event_id` which event asks."""

    manner: Manner
    where: Where
    event_id: str | None


class RealtimeSession(SocketSession):
    messages: ClassVar[dict[str, type[Body]]] = MESSAGES

    def __init__(self, state: ServerState, socket: WebSocket) -> None:
        super().__init__(socket)
        self._state, self._id = state, new_id("sess")
        self._conversation = Conversation(state.omni.config.limits.max_prompt_length)
        self._input = InputSound(state.media.held, state.config.media.max_media_bytes)
        self._manner = Manner(spoken=False, voice=None)
        self._turns: ServerVad | None = None
        self._turn_id = new_id("item")  # of the item that the turn under way becomes
        self._can: Capabilities | None = None
        self._opened, self._more = asyncio.Event(), asyncio.Event()
        self._due: _Asked | None = None
        self._answer: Answer | None = None
        self._engine_id = ""  # of the request that makes it

    def patience(self) -> float | None:
        busy = self._due is not None or self._answer is not None
        return None if busy else self._state.config.http.realtime_idle_timeout

    def complaint(self, error: PolymuxError) -> BaseModel:
        return _complaint(error, self.named)

    async def take(self, message: Body) -> None:
        await self._opened.wait()
        match message:
            case SessionUpdate():
                await self._update(message)
            case AudioAppend():
                await self._hear(message.audio)
            case AudioCommit():
                self._input.check()
                item_id = self._turn_id if self._input.speaking else new_id("item")
                await self._commit(self._input.take(), item_id)
            case AudioClear():
                self._input.clear()
                await self.tell(BufferCleared())
            case ItemCreate():
                await self._create_item(message)
            case ItemDelete():
                self._conversation.delete(message.item_id)
                await self.tell(ItemDeleted(item_id=message.item_id))
            case ResponseCreate():
                self._ask(message)
            case ResponseCancel():
                self._cancel(message.response_id)

    async def work(self) -> None:
        await self._open()
        while True:
            await self._more.wait()
            self._more.clear()
            while (asked := self._due) is not None:
                self._due = None
                await self._respond(asked)

    async def _open(self) -> None:
        """Raises PolymuxError if there is nobody to talk with."""
        query = self.socket.query_params
        for name in query:
            if name != "model":
                raise InvalidRequestError(f"unknown parameter {name[:80]!r}; known is model", param=name[:80])
        self._state.check_model(query.get("model"))
        can = await self._state.model()
        can = can.answers or can
        if not can.chats:
            raise InvalidRequestError(f"the model answers no conversations, it makes {can.modality}", param="model")
        self._can = can
        self._manner = Manner(spoken="audio" in can.makes, voice=can.voices[0] if can.voices else None)
        self._turns = ServerVad() if "audio" in can.media else None
        self._input.listen(self._turns)
        await self.tell(SessionEvent(type="session.created", session=self._view()))
        self._opened.set()

    async def _update(self, message: SessionUpdate) -> None:
        note(self.socket, message)
        asked, can = message.session, self._able
        self._state.check_model(asked.model)
        heard = asked.audio.input if asked.audio is not None else None
        turns = self._turns
        if heard is not None and "turn_detection" in heard.model_fields_set:
            turns = heard.turn_detection
        if turns is not None and "audio" not in can.media:
            name = "session.audio.input.turn_detection"
            raise InvalidRequestError(f"{name}: the model does not hear", param=name)
        manner = self._manner.changed(asked, asked.audio.output if asked.audio is not None else None)
        manner.check(can, self._state.omni.config.limits, "session")
        self._manner, self._turns = manner, turns
        self._input.listen(turns)
        await self.tell(SessionEvent(type="session.updated", session=self._view()))

    async def _hear(self, audio: str) -> None:
        if "audio" not in self._able.media:
            raise InvalidRequestError("audio: the model does not hear", param="audio")
        for edge in self._input.add(samples_in(audio, "audio")):
            if edge.kind == "began":
                self._turn_id = new_id("item")
                if self._turns is not None and self._turns.interrupt_response:
                    self._due = None
                    self._stop("turn_detected")
                await self.tell(SpeechStarted(audio_start_ms=milliseconds(edge.at), item_id=self._turn_id))
            else:
                await self.tell(SpeechStopped(audio_end_ms=milliseconds(edge.at), item_id=self._turn_id))
                try:
                    await self._commit(self._input.take_turn(edge.at), self._turn_id)
                except PolymuxError as error:  # of this turn alone: more may have come with its end
                    await self.tell(self.complaint(error))
                    continue
                if self._turns is not None and self._turns.create_response:
                    self._begin(_Asked(self._manner, "session", None))

    async def _commit(self, sound: Array, item_id: str) -> None:
        item = Item("user", [sound], id=item_id)
        self._conversation.check_room(item)
        await self.tell(BufferCommitted(item_id=item_id, previous_item_id=self._conversation.last_id))
        await self._add(item)

    async def _create_item(self, message: ItemCreate) -> None:
        given, parts = message.item, list[str | Array]()
        for i, part in enumerate(given.content):
            if isinstance(part, SoundInput):
                parts.append(self._sound(f"item.content.{i}", part.audio))
            else:
                parts.append(part.text)
        if given.role == "assistant":
            parts = ["\n".join(part for part in parts if isinstance(part, str))]
        item = Item(given.role, parts) if given.id is None else Item(given.role, parts, id=given.id)
        self._conversation.check_room(item)
        await self._add(item, message.previous_item_id)

    def _sound(self, name: str, audio: str) -> Array:
        if "audio" not in self._able.media:
            raise InvalidRequestError(f"{name}: the model does not hear", param=name)
        samples = samples_in(audio, f"{name}.audio").reshape(1, -1)
        self._state.media.held.add_array(samples)
        return samples

    async def _add(self, item: Item, after: str | None = None) -> None:
        before = self._conversation.add(item, after)
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self.tell(ItemEvent(type=kind, previous_item_id=before, item=item.view()))

    def _ask(self, message: ResponseCreate) -> None:
        if self._answer is not None or self._due is not None:
            raise InvalidRequestError("a response is under way: cancel it, or wait for response.done", param="type")
        fields = message.response
        if fields is None:
            self._begin(_Asked(self._manner, "session", message.event_id))
            return
        manner = self._manner.changed(fields, fields.audio.output if fields.audio is not None else None)
        manner.check(self._able, self._state.omni.config.limits, "response")
        self._begin(_Asked(manner, "response", message.event_id))

    def _begin(self, asked: _Asked) -> None:
        """As soon as the one that may be under way has ended."""
        self._due = asked
        self._more.set()

    def _cancel(self, response_id: str | None) -> None:
        if self._answer is None or response_id not in (None, self._answer.id):
            shown = "" if response_id is None else f"response_id={response_id[:80]!r}: "
            raise InvalidRequestError(f"{shown}no such response is under way", param="response_id")
        self._due = None
        self._stop("client_cancelled")

    def _stop(self, reason: Reason) -> None:
        if self._answer is not None:
            self._answer.stop(reason)
            self._state.omni.abort(self._engine_id)

    async def _respond(self, asked: _Asked) -> None:
        manner = asked.manner
        self._engine_id = f"{self.socket.state.request_id}-{uuid.uuid4().hex[:8]}"
        try:
            prompt = self._conversation.prompt(manner.instructions, manner.spoken)
            session = session_of(self.socket)
            source = self._state.omni.stream(prompt, manner.params, request_id=self._engine_id, **session)
        except InvalidRequestError as error:
            await self.tell(_complaint(in_words_of(asked.where, error), asked.event_id))
            return
        except PolymuxError as error:
            await self.tell(_complaint(error, asked.event_id))
            return
        item = Item("assistant", [""], status="in_progress", spoken=manner.spoken)
        before = self._conversation.add(item)
        answer = self._answer = Answer(manner, self._conversation.id, item, before)
        try:
            async with contextlib.aclosing(answer.events(source)) as events:
                async for event in events:
                    if isinstance(event, ResponseEvent) and event.type == "response.done":
                        self._answer = None  # the client may ask for the next one as soon as it has this
                    await self.tell(event)
        finally:
            self._answer = None

    @property
    def _able(self) -> Capabilities:
        assert self._can is not None  # nothing is taken before
        return self._can

    def _view(self) -> SessionView:
        manner = self._manner
        return SessionView(
            id=self._id,
            model=self._state.model_names[0],
            output_modalities=manner.modalities,
            instructions=manner.instructions,
            audio=AudioView(input=InputView(turn_detection=self._turns), output=manner.output),
            max_output_tokens=manner.most_tokens,
            temperature=manner.temperature,
            seed=manner.seed,
            extra_args=manner.extra_args,
        )


def _complaint(error: PolymuxError, event_id: str | None) -> ErrorEvent:
    told = error_body(error).error
    return ErrorEvent(
        error=RealtimeError(type=told.type, code=told.code, message=told.message, param=told.param, event_id=event_id)
    )

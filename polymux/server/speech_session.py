"""One session of WS /v1/audio/speech/stream: a text comes in parts, each sentence is spoken as soon as it is complete.

Sentences are spoken one after the other, each a request of its own to the engine; what makes a sentence stands in
`media.sentences`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

from fastapi import WebSocket

from polymux.errors import InvalidRequestError, PolymuxError
from polymux.media.audio import AudioFormat
from polymux.media.sentences import SentenceStream
from polymux.request import Capabilities, SamplingParams
from polymux.server.errors import error_body
from polymux.server.log import note
from polymux.server.protocol import Body
from polymux.server.recording import in_our_words, speech_params, uploaded
from polymux.server.seed import seed_of
from polymux.server.session import session_of
from polymux.server.socket_session import SessionOver, SocketSession
from polymux.server.speech import pieces_of, reading_model
from polymux.server.speech_session_protocol import (
    MESSAGES,
    AudioDone,
    AudioStart,
    InputDone,
    InputText,
    SessionClose,
    SessionConfig,
    SessionDone,
)
from polymux.server.state import ServerState

MAX_MESSAGE = 4 * 2**20  # bytes; a recording may be in one
_MAX_TEXT_MESSAGE = 128 * 1024
_CONFIG_S = 10.0  # until the first message must be there
_FORMAT: AudioFormat = "wav"


@dataclass(frozen=True)
class _Settings:
    """How this session speaks."""

    params: SamplingParams
    uploaded: str | None
    seed: int
    format: AudioFormat
    can: Capabilities


@dataclass(frozen=True)
class _Sentence:
    """`text` None: the text ends here."""

    utterance: int
    index: int
    text: str | None
    settings: _Settings


class Speakers:
    """Who speaks: what a mark in one sentence says holds for those that follow, which are requests of their own."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._current: str | None = None

    def of(self, text: str, params: SamplingParams) -> tuple[str, SamplingParams]:
        """The sentence and how to speak it."""
        begins = any(text.startswith(mark) for mark in self._marks)
        before = self._current
        last = max((text.rfind(mark), mark) for mark in self._marks) if self._marks else (-1, "")
        if last[0] >= 0:
            self._current = last[1]
        if begins:
            return text, replace(params, voice=None)
        if before is not None:
            return f"{before} {text}", replace(params, voice=None)
        return text, params


class SpeechSession(SocketSession):
    messages: ClassVar[dict[str, type[Body]]] = MESSAGES
    longest: ClassVar[dict[str, int]] = {"input.text": _MAX_TEXT_MESSAGE}

    def __init__(self, state: ServerState, socket: WebSocket) -> None:
        super().__init__(socket)
        self._state = state
        self._settings: _Settings | None = None
        self._text = SentenceStream()
        self._utterance = self._sentences = self._received = 0  # the text, its sentences, its characters
        self._queue: deque[_Sentence] = deque()
        self._more = asyncio.Event()
        self._speaking = False

    def patience(self) -> float | None:
        if self._settings is None:
            return _CONFIG_S
        return None if self._queue or self._speaking else self._state.config.http.speech_idle_timeout

    async def take(self, message: Body) -> None:
        match message:
            case SessionConfig():
                await self._configure(message)
            case InputText():
                self._add(message.text)
            case InputDone():
                settings, most = self._configured(), self._state.omni.config.limits.max_prompt_length
                if len(self._queue) >= most:
                    raise InvalidRequestError(f"input.done: {most} sentences and ends of texts wait", param="type")
                self._put(self._text.finish(), settings)
                self._queue.append(_Sentence(self._utterance, self._sentences, None, settings))
                self._utterance, self._sentences, self._received = self._utterance + 1, 0, 0
                self._more.set()
            case SessionClose():
                raise SessionOver

    async def _configure(self, message: SessionConfig) -> None:
        if self._received or self._queue or self._speaking:
            raise InvalidRequestError("session.config: a text is under way", param="type")
        if message.user is not None:
            self.socket.state.user = message.user
        note(self.socket, message)
        self._state.check_model(message.model)
        session_of(self.socket)  # what is wrong with it is not told of every sentence
        can = await reading_model(self._state)
        params = await speech_params(self._state, message, can)
        seed = seed_of(params.seed, can)
        voice, format = uploaded(message, params), message.response_format or _FORMAT
        self._settings = _Settings(replace(params, seed=seed), voice, seed, format, can)

    def _configured(self) -> _Settings:
        if self._settings is None:
            raise InvalidRequestError("session.config must come first", param="type")
        return self._settings

    def _add(self, text: str) -> None:
        settings, most = self._configured(), self._state.omni.config.limits.max_prompt_length
        waiting = self._text.waiting + sum(len(sentence.text or "") for sentence in self._queue)
        if waiting + len(text) > most:
            what = f"{waiting} characters wait to be spoken, and {len(text)} come"
            raise InvalidRequestError(f"text: {what}: allowed are {most} (--max-prompt-length)", param="text")
        self._received += len(text)
        self._put(self._text.add(text), settings)

    def _put(self, sentences: list[str], settings: _Settings) -> None:
        for text in sentences:
            self._queue.append(_Sentence(self._utterance, self._sentences, text, settings))
            self._sentences += 1
        self._more.set()

    async def work(self) -> None:
        utterance, speakers = -1, Speakers(())
        while True:
            while not self._queue:
                self._more.clear()
                await self._more.wait()
            sentence = self._queue.popleft()
            if sentence.utterance != utterance:
                utterance, speakers = sentence.utterance, Speakers(sentence.settings.can.speaker_marks)
            self._speaking = True
            try:
                if sentence.text is None:
                    await self.tell(SessionDone(utterance_index=sentence.utterance, total_sentences=sentence.index))
                else:
                    await self._speak(sentence, sentence.text, speakers)
            finally:
                self._speaking = False

    async def _speak(self, sentence: _Sentence, said: str, speakers: Speakers) -> None:
        settings, total, failure = sentence.settings, 0, None
        await self.tell(
            AudioStart(
                utterance_index=sentence.utterance,
                sentence_index=sentence.index,
                sentence_text=said,
                format=settings.format,
                sample_rate=settings.can.sample_rate,
                seed=settings.seed,
            )
        )
        text, params = speakers.of(said, settings.params)
        engine_id = f"{self.socket.state.request_id}-{uuid.uuid4().hex[:8]}"
        try:
            with in_our_words(settings.uploaded):
                session = session_of(self.socket)
                source = self._state.omni.stream(text, params, request_id=engine_id, **session)
                async with contextlib.aclosing(pieces_of(source, settings.format)) as pieces:
                    async for new, _ in pieces:
                        await self.tell_bytes(new)
                        total += len(new)
        except PolymuxError as error:
            failure = error_body(error).error
        done = AudioDone(
            utterance_index=sentence.utterance, sentence_index=sentence.index, total_bytes=total, error=failure
        )
        await self.tell(done)

"""POST /v1/chat/completions of models that answer with text, and with speech if that is asked for."""

from __future__ import annotations

import base64
import binascii
import time
from typing import Any

import httpx2
import msgspec

from polymux.bench.dataset import Item
from polymux.bench.endpoint import Answer, BadAnswer, events
from polymux.bench.settings import RequestSettings
from polymux.bench.sound import OPENAI_RATE, Sound
from polymux.metrics.playback import Playback


class _Audio(msgspec.Struct):
    data: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    audio: _Audio | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None


class _Details(msgspec.Struct):
    text_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    completion_tokens_details: _Details | None = None

    @property
    def written(self) -> int:
        """Tokens of text."""
        details = self.completion_tokens_details
        return details.text_tokens if details and details.text_tokens is not None else self.completion_tokens


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Chat:
    """Implements `endpoint.Endpoint`. Speech is asked for as WAV; streamed, as bare samples, as OpenAI has it."""

    def __init__(self, settings: RequestSettings, model: str | None) -> None:
        self._settings, self._model = settings, model

    def body(self, item: Item, index: int) -> dict[str, Any]:
        settings = self._settings
        given: dict[str, Any] = {
            "model": self._model,
            "max_completion_tokens": settings.max_tokens,
            "seed": None if settings.seed is None else settings.seed + index,
            "stream": settings.stream or None,
            "stream_options": {"include_usage": True} if settings.stream else None,
        }
        if settings.speak:
            voice = {} if settings.voice is None else {"voice": settings.voice}
            audio = {"format": "pcm16" if settings.stream else "wav", **voice}
            given |= {"modalities": ["text", "audio"], "audio": audio}
        fields = {name: value for name, value in given.items() if value is not None}
        messages = [{"role": "user", "content": item.prompt}]
        return {"messages": messages} | fields | settings.extra_body | item.fields

    async def read(self, response: httpx2.Response) -> Answer:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await self._stream(response)
        try:
            made = msgspec.json.decode(await response.aread(), type=_Completion)
        except msgspec.DecodeError as error:
            raise BadAnswer("invalid_answer", str(error)) from None
        message = next((choice.message for choice in made.choices if choice.message is not None), None)
        if message is None:
            raise BadAnswer("no_answer", "the answer holds no message")
        sound = Sound()
        if self._settings.speak:
            sound.came(_decoded(message.audio))
        return self._answer(made.usage.written if made.usage else 0, sound, (), None)

    async def _stream(self, response: httpx2.Response) -> Answer:
        times, sound, playback, usage = list[float](), Sound(OPENAI_RATE), Playback(), None
        async for event in events(response, _Completion):
            if event.error is not None:
                raise BadAnswer("stream_error", str(event.error)[:200])
            usage = event.usage or usage
            now = time.perf_counter()
            for delta in (choice.delta for choice in event.choices if choice.delta is not None):
                if delta.content:
                    times.append(now)
                if delta.audio is not None and (seconds := sound.came(_decoded(delta.audio))):
                    playback.came(now, seconds)
        if not times and not usage:
            raise BadAnswer("no_answer", "the stream holds no text")
        return self._answer(usage.written if usage else len(times), sound, tuple(times), playback)

    def _answer(self, tokens: int, sound: Sound, times: tuple[float, ...], playback: Playback | None) -> Answer:
        if self._settings.speak and not sound.seconds:
            raise BadAnswer("no_sound", "the answer holds no sound")
        heard = playback if self._settings.speak else None
        return Answer(1, tokens=tokens, times=times, sound=sound.seconds, playback=heard)


def _decoded(audio: _Audio | None) -> bytes:
    try:
        return base64.b64decode((audio and audio.data) or "", validate=True)
    except binascii.Error as error:
        raise BadAnswer("broken_sound", str(error)) from None

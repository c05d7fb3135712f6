"""POST /v1/audio/speech: text in, sound out, at once or as it is made."""

from __future__ import annotations

import time
from typing import Any

import httpx2

from polymux.bench.dataset import Item
from polymux.bench.endpoint import Answer, BadAnswer
from polymux.bench.settings import RequestSettings
from polymux.bench.sound import OPENAI_RATE, Sound
from polymux.metrics.playback import Playback


class Speech:
    """Implements `endpoint.Endpoint`. `response_format` is wav, unless further fields say pcm."""

    def __init__(self, settings: RequestSettings, model: str | None) -> None:
        self._settings, self._model = settings, model

    def body(self, item: Item, index: int) -> dict[str, Any]:
        settings = self._settings
        given = {
            "model": self._model,
            "voice": settings.voice,
            "seed": None if settings.seed is None else settings.seed + index,
            "response_format": "wav",
            "stream_format": "audio" if settings.stream else None,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        return {"input": item.prompt} | fields | settings.extra_body | item.fields

    async def read(self, response: httpx2.Response) -> Answer:
        kind = response.headers.get("content-type", "")
        if not kind.startswith("audio/"):
            raise BadAnswer("no_sound", f"the answer is {kind or 'of no type'}")
        bare = int(response.headers.get("x-sample-rate", OPENAI_RATE)) if kind.startswith("audio/pcm") else None
        sound, playback = Sound(bare), Playback()
        async for data in response.aiter_bytes():
            seconds = sound.came(data)
            if seconds:
                playback.came(time.perf_counter(), seconds)
        if not sound.seconds:
            raise BadAnswer("no_sound", "the answer holds no sound")
        return Answer(1, sound=sound.seconds, playback=playback if self._settings.stream else None)

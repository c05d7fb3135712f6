"""Stages that compute nothing: the first one counts, the last one speaks what it gets, one between them hands it on.
Started as `fake_stage.py` is.

The prompt of a request says what happens: words `chunks N` (how many are handed on), `floats N` (how large each is),
`stall` (the first stage hands on one chunk, and no more), `fail` (the second stage fails at its second chunk),
`hang` (the second stage never comes back from its first chunk), `mute` (the first stage hands on nothing; with
`stall`, it never ends).
"""

import json
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from polymux.config import EngineConfig
from polymux.connector import make_connector
from polymux.engine.process import main
from polymux.errors import GenerationError, PolymuxError, RequestAbortedError
from polymux.media.wire import to_wire
from polymux.parcel import Chunk, Consumed
from polymux.request import (
    Capabilities,
    Event,
    Failed,
    Finished,
    Progress,
    Request,
    RequestMetrics,
    SoundPiece,
    StageStats,
)

WINDOW = 3
CAPABILITIES = Capabilities(
    family="fake", pipeline="F", modality="audio", arguments=("prompt",), required=("prompt",), media={}, samples=True,
    max_new_tokens=10,
)  # fmt: skip


def words(request: Request) -> dict[str, int]:
    found = (request.prompt or "").split()
    return {word: int(found[i + 1]) if found[i + 1 : i + 2] and found[i + 1].isdigit() else 1
            for i, word in enumerate(found) if not word.isdigit()}  # fmt: skip


class Fake:
    """What both have in common."""

    def __init__(self, config: EngineConfig) -> None:
        self.connector = make_connector(config.stages)
        self.requests: dict[str, Request] = {}
        self.events: list[Event] = []
        self.under_way: dict[str, int] = {}
        self.done: dict[str, int] = {}

    capabilities = CAPABILITIES

    @property
    def stats(self) -> StageStats:
        return StageStats(running=len(self.requests), steps=sum(self.done.values()))

    def warm_up(self) -> None:
        pass

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.under_way[request.request_id] = self.done[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        self.connector.forget(request_id)
        if self.requests.pop(request_id, None):
            self.events.append(Failed(request_id, RequestAbortedError("aborted").info()))

    def taken(self, request_id: str) -> None:
        self.connector.taken(request_id)
        if request_id in self.under_way:
            self.under_way[request_id] -= 1

    def sleep(self, level: int) -> int:
        return 1000

    def wake_up(self) -> None:
        pass

    def close(self) -> None:
        self.connector.close()

    def flush(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def end(self, request_id: str, seeds: list[int | None], metrics: RequestMetrics) -> None:
        del self.requests[request_id]
        self.events.append(Finished(request_id, "audio", [[]], seeds, metrics, sample_rate=100))


class Counter(Fake):
    """Hands on 0, 1, 2, ..."""

    @property
    def busy(self) -> bool:
        return bool(self.events) or any(map(self._may, self.requests.values()))

    def _may(self, request: Request) -> bool:
        name = request.request_id
        return self.under_way[name] < WINDOW and not ("stall" in words(request) and self.done[name])

    def feed(self, chunk: Chunk) -> None:
        raise TypeError

    def step(self) -> list[Event]:
        time.sleep(0.001)
        for name, request in list(self.requests.items()):
            if not self._may(request):
                continue
            asked, number = words(request), self.done[name]
            if "mute" in asked:
                self.events.append(Progress(name, "denoise", 1, 1))
                self.done[name] += 1
                if "stall" not in asked:
                    self.end(name, [7], RequestMetrics(steps=1))
                continue
            last = number + 1 == asked.get("chunks", 1)
            parcel = self.connector.put(name, {"x": np.full(asked.get("floats", 1), number, np.float32)})
            self.events += [
                Progress(name, "denoise", number + 1, asked.get("chunks", 1)),
                Chunk(name, 0, parcel, last, last),
            ]
            self.under_way[name] += 1
            self.done[name] += 1
            if last:
                self.end(name, [7], RequestMetrics(denoise=1.0, steps=number + 1))
        return self.flush()


class Speaker(Fake):
    """Each chunk becomes a piece of sound: its first value, its length."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.inbox: dict[str, deque[Chunk]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.events) or any(map(self._may, self.requests))

    def _may(self, name: str) -> bool:
        return bool(self.inbox.get(name)) and self.under_way[name] < WINDOW

    def feed(self, chunk: Chunk) -> None:
        if chunk.request_id in self.requests:
            self.inbox[chunk.request_id].append(chunk)

    def add(self, request: Request) -> None:
        super().add(request)
        self.inbox[request.request_id] = deque()

    def step(self) -> list[Event]:
        for name, request in list(self.requests.items()):
            if not self._may(name):
                continue
            if "hang" in words(request):
                time.sleep(600)
            chunk = self.inbox[name].popleft()
            try:
                x = self.connector.get(chunk.parcel)["x"]
                if "fail" in words(request) and self.done[name]:
                    raise GenerationError("did not work")
            except PolymuxError as error:
                del self.requests[name]
                self.events.append(Failed(name, error.info()))
                continue
            assert (x == x[0]).all()
            sound = to_wire(np.array([[x[0], len(x)]], np.float32), 100)
            self.events += [Consumed(name, 0.5), Progress(name, "decode", 0, 0), SoundPiece(name, 0, sound)]
            self.under_way[name] += 1
            self.done[name] += 1
            if chunk.last:
                self.end(name, [], RequestMetrics(decode=2.0))
        return self.flush()


class Relay(Speaker):
    """Each chunk is handed on as it is."""

    def step(self) -> list[Event]:
        for name in list(self.requests):
            if not self._may(name):
                continue
            chunk = self.inbox[name].popleft()
            parcel = self.connector.put(name, self.connector.get(chunk.parcel))
            self.events += [Consumed(name, 0.25), Chunk(name, 0, parcel, chunk.last, chunk.last)]
            self.under_way[name] += 1
            if chunk.last:
                self.end(name, [], RequestMetrics(audio_tokens=3))
        return self.flush()


def make(config: EngineConfig) -> Fake:
    assert config.stages.split_stages
    family = json.loads(Path(config.model.model, "config.json").read_text())["architectures"][0]
    stages = (Counter, Speaker) if family.startswith("Dia") else (Counter, Relay, Speaker)
    return stages[config.stage](config)


if __name__ == "__main__":
    sys.exit(main(make_engine=make))

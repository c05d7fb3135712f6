"""Sends requests when they are due, and notes what becomes of each.

Arrivals do not wait for answers: a server that is slow does not slow the arrivals down, except where --max-concurrency
says so, and then the time spent waiting here is noted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import msgspec

from polymux.bench.dataset import Item
from polymux.bench.endpoint import Answer, BadAnswer, Endpoint
from polymux.bench.records import Record
from polymux.bench.settings import LoadSettings

KEEP = 300  # characters of an error's message
_CONTENT = ("prompt", "input", "messages", "seed")  # fields that do not change how a server computes
UNREACHABLE = "connection"
TIMEOUT = "timeout"

Ended = Callable[[Record], None]


class Load:
    """One measurement of one server."""

    def __init__(self, http: httpx2.AsyncClient, endpoint: Endpoint, settings: LoadSettings) -> None:
        self._http, self._endpoint, self._settings = http, endpoint, settings

    async def warm_up(self, items: Sequence[Item]) -> list[Record]:
        """Send requests of every shape that will be measured, as often as the settings say, all at once per shape."""
        shapes: dict[bytes, tuple[Item, int]] = {}
        for index, item in enumerate(items):
            shapes.setdefault(self._shape(item, index), (item, index))
        records = []
        for item, index in shapes.values():
            round_ = [Record(index, due=0.0) for _ in range(self._settings.num_warmups)]
            await asyncio.gather(*(self._request(record, item, time.perf_counter()) for record in round_))
            records += round_
        return records

    async def measure(self, items: Sequence[Item], ended: Ended, stop: asyncio.Event) -> tuple[list[Record], float]:
        """Send all items; `ended` is called with each as it ends. When `stop` is set, nothing more is sent and what is
        under way is given up. Returns the records, in order, and the seconds that it took."""
        records = [Record(index, due) for index, due in enumerate(self._arrivals(len(items)))]
        places = asyncio.Semaphore(self._settings.max_concurrency or len(items))
        start = time.perf_counter()

        async def one(record: Record, item: Item) -> None:
            await asyncio.sleep(start + record.due - time.perf_counter())
            async with places:
                if self._settings.request_rate is None:  # a client sends its next request when it has its last answer
                    record.due = time.perf_counter() - start
                await self._request(record, item, start)
            ended(record)

        work = asyncio.gather(*map(one, records, items))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - start
        stopping.cancel()
        if not work.done():
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return records, seconds

    def _arrivals(self, count: int) -> list[float]:
        rate, chance = self._settings.request_rate, random.Random(f"arrivals {self._settings.load_seed}")
        if rate is None:
            return [0.0] * count
        times, now = [], 0.0
        for _ in range(count):
            times.append(now)
            now += chance.expovariate(rate)
        return times

    def _shape(self, item: Item, index: int) -> bytes:
        """Of a request: all of it that takes a server to a new way of computing."""
        body = self._endpoint.body(item, index)
        return msgspec.json.encode({k: v for k, v in body.items() if k not in _CONTENT}, order="sorted")

    async def _request(self, record: Record, item: Item, start: float) -> None:
        body = self._endpoint.body(item, record.index)
        begin = time.perf_counter()
        record.sent = begin - start
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                answer = await self._exchange(record, body)
        except BadAnswer as error:
            record.error, record.message = error.kind, str(error)[:KEEP]
        except TimeoutError:
            record.error, record.message = TIMEOUT, f"no answer within {self._settings.request_timeout:g} s"
        except httpx2.HTTPError as error:
            record.error, record.message = UNREACHABLE, f"{type(error).__name__}: {error}"[:KEEP]
        else:
            _note(record, answer, begin)
        record.latency = time.perf_counter() - begin

    async def _exchange(self, record: Record, body: dict[str, Any]) -> Answer:
        async with self._http.stream("POST", self._settings.endpoint, json=body) as response:
            record.status = response.status_code
            if response.status_code != 200:
                raise _refusal(response.status_code, await response.aread())
            return await self._endpoint.read(response)


def _note(record: Record, answer: Answer, begin: float) -> None:
    record.outputs, record.pixels = answer.outputs, answer.pixels
    record.tokens, record.sound = answer.tokens, answer.sound
    record.first = None if answer.first is None else answer.first - begin
    if answer.times:
        record.first_text = answer.times[0] - begin
        record.gaps = [later - earlier for earlier, later in itertools.pairwise(answer.times)]
    if answer.playback is not None and answer.playback.first is not None:
        record.first_sound = answer.playback.first - begin
        record.underruns, record.silence = answer.playback.breaks, answer.playback.silence


class _Detail(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Error(msgspec.Struct):
    error: _Detail


def _refusal(status: int, content: bytes) -> BadAnswer:
    """In OpenAI's form, or whatever it is."""
    try:
        detail = msgspec.json.decode(content, type=_Error).error
    except msgspec.DecodeError:
        return BadAnswer(f"http_{status}", content[:KEEP].decode(errors="replace"))
    return BadAnswer(f"http_{status}_{detail.code}" if detail.code else f"http_{status}", detail.message)

"""What a stage process does: one engine, driven by messages from the API process.

Knows no requests' contents and no torch: the engine is imported when the process runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from polymux import logs
from polymux.config import EngineConfig
from polymux.engine.base import StageEngine
from polymux.engine.channel import Channel, vanish
from polymux.engine.followers import GiveUp
from polymux.errors import ConfigError, PayloadTooLargeError, PolymuxError, info_of
from polymux.messages import (
    Abort,
    Add,
    Awake,
    Fatal,
    Profiled,
    Ready,
    Sleep,
    Slept,
    Start,
    StartProfile,
    Stats,
    Stop,
    StopProfile,
    Taken,
    ToStage,
    WakeUp,
)
from polymux.parcel import Chunk
from polymux.request import Event, Failed, Finished, Request, StageStats

if TYPE_CHECKING:
    from polymux.engine.profiler import Profiler

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.05

MakeEngine = Callable[[EngineConfig], StageEngine]
MakeRanks = Callable[[EngineConfig, GiveUp], StageEngine]
Elsewhere = Callable[[Channel, EngineConfig], None]


def run(fd: int, make_engine: MakeEngine, make_ranks: MakeRanks, elsewhere: Elsewhere | None = None) -> int:
    """Be a stage until told to stop. Returns the exit code. `elsewhere`: has other processes be the stage, where the
    configuration says so, and passes on what is said."""
    channel = Channel(fd)
    try:
        start = channel.receive(block=True)
        if not isinstance(start, Start):
            raise TypeError(f"the first message is {type(start).__name__}, not Start")
        logs.configure(start.config.log)
        if elsewhere is not None and start.config.workers.ray:
            elsewhere(channel, start.config)
        else:
            Stage(channel, make_engine, make_ranks).run(start.config)
    except Exception as error:  # the border of the process: whatever it was, the parent must hear of it
        if not isinstance(error, PolymuxError):
            log.info("the stage cannot go on", exc_info=True)  # the parent says it, too, in a line
        channel.send(Fatal(info_of(error)))
        return 1
    finally:
        channel.close()
    return 0


class Stage:
    """The loop between a channel and an engine."""

    def __init__(self, channel: Channel, make_engine: MakeEngine, make_ranks: MakeRanks) -> None:
        self._channel = channel
        self._make_engine, self._make_ranks = make_engine, make_ranks
        self._stopping = False
        self._profiler: Profiler | None = None
        self._reported = StageStats()
        self._reported_at = 0.0

    def run(self, config: EngineConfig) -> None:
        """Load, report ready, serve. Raises what makes it impossible to go on."""
        self._profiler = _profiler_for(config)
        alone = config.parallel.world_size == 1 or config.decoding.elsewhere
        engine = self._make_engine(config) if alone else self._make_ranks(config, self._give_up)
        if config.process.warmup:
            engine.warm_up()
        self._report(engine.stats)  # before Ready: what the warm-up did belongs to nobody's request
        self._channel.send(Ready(engine.capabilities))
        while engine.busy or not self._stopping:
            self._take_messages(engine)
            self._send(engine, engine.step())
        engine.close()

    def _give_up(self, error: PolymuxError) -> None:
        """In any thread: whatever this process does, in a collective say, it will not end; so it is ended."""
        log.error("%s; all ranks of this stage are ended", error)
        self._channel.send(Fatal(info_of(error)))
        self._channel.close()
        vanish()

    def _take_messages(self, engine: StageEngine) -> None:
        message = self._channel.receive(block=not engine.busy)
        while message is not None:
            self._take(engine, message)
            message = self._channel.receive(block=False)

    def _take(self, engine: StageEngine, message: ToStage) -> None:
        match message:
            case Add(request):
                self._add(engine, request)
            case Abort(request_id):
                engine.abort(request_id)
            case Taken(request_id):
                engine.taken(request_id)
            case Chunk():
                engine.feed(message)
            case Sleep(level):
                self._sleep(engine, level)
            case WakeUp():
                self._wake_up(engine)
            case StartProfile() | StopProfile():
                self._channel.send(self._profile(message))
            case Stop():
                self._stopping = True
            case Start():
                raise TypeError("a second Start")

    def _add(self, engine: StageEngine, request: Request) -> None:
        try:
            engine.add(request)
        except Exception as error:  # the engine holds nothing of the request, so nobody else is concerned
            if not isinstance(error, PolymuxError):
                log.info("request %s was not accepted", request.request_id, exc_info=True)
            self._channel.send(Failed(request.request_id, info_of(error)))

    def _sleep(self, engine: StageEngine, level: int) -> None:
        while engine.busy:
            self._send(engine, engine.step())
        try:
            freed = engine.sleep(level)
        except PolymuxError as error:
            self._channel.send(Slept(0, error.info()))
            return
        self._report(engine.stats)  # before the answer, as for requests
        self._channel.send(Slept(freed))

    def _wake_up(self, engine: StageEngine) -> None:
        try:
            engine.wake_up()
        except PolymuxError as error:
            self._channel.send(Awake(error.info()))
            return
        self._report(engine.stats)
        self._channel.send(Awake())

    def _profile(self, message: StartProfile | StopProfile) -> Profiled:
        try:
            if self._profiler is None:
                raise ConfigError("profiling needs --profiler-config", param="profiler_config")
            if isinstance(message, StopProfile):
                return Profiled(str(self._profiler.stop()))
            self._profiler.start(message.prefix)
        except PolymuxError as error:
            return Profiled(error=error.info())
        return Profiled()

    def _send(self, engine: StageEngine, events: list[Event]) -> None:
        ended = any(isinstance(event, (Finished, Failed)) for event in events)
        # Before the events: whoever gets an answer and then looks at the numbers finds it counted.
        if ended or not engine.busy or time.monotonic() - self._reported_at >= STATS_INTERVAL_S:
            self._report(engine.stats)
        for event in events:
            try:
                self._channel.send(event)
            except PayloadTooLargeError as error:
                self._channel.send(Failed(event.request_id, error.info()))

    def _report(self, stats: StageStats) -> None:
        if stats != self._reported:
            self._channel.send(Stats(stats))
            self._reported, self._reported_at = stats, time.monotonic()


def _profiler_for(config: EngineConfig) -> Profiler | None:
    settings = config.profiler.torch
    if settings is None:
        return None
    from polymux.engine.profiler import Profiler  # torch

    return Profiler(settings)

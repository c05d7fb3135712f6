"""The stage process: one engine, driven by messages from the API process.

    python -m polymux.engine.process --fd N

N is one end of a socket pair. Knows no requests' contents and no torch: the engine is imported when the process runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polymux import logs
from polymux.config import EngineConfig, LogConfig
from polymux.engine.base import StageEngine
from polymux.engine.channel import Channel, vanish
from polymux.engine.followers import Followers, GiveUp
from polymux.errors import ConfigError, PayloadTooLargeError, PolymuxError, info_of
from polymux.knobs import check_unchanged
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


def run(fd: int, make_engine: MakeEngine, make_ranks: MakeRanks) -> int:
    """Be a stage until told to stop. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when a stage ends
    channel = Channel(fd)
    try:
        Stage(channel, make_engine, make_ranks).run()
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

    def run(self) -> None:
        """Load, report ready, serve. Raises what makes it impossible to go on."""
        start = self._channel.receive(block=True)
        if not isinstance(start, Start):
            raise TypeError(f"the first message is {type(start).__name__}, not Start")
        logs.configure(start.config.log)
        self._profiler = _profiler_for(start.config)
        alone = start.config.parallel.world_size == 1
        engine = self._make_engine(start.config) if alone else self._make_ranks(start.config, self._give_up)
        if start.config.process.warmup:
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


def _engine_for(config: EngineConfig) -> StageEngine:
    """The engine of the kind that the checkpoint needs."""
    from diffusers.utils import logging as diffusers_logging  # torch: only here, in the process that computes
    from transformers.utils import logging as transformers_logging

    from polymux.engine.chat_engine import ChatEngine
    from polymux.engine.decode_engine import DecodeEngine
    from polymux.engine.diffusion_engine import DiffusionEngine
    from polymux.engine.generate_engine import GenerateEngine
    from polymux.engine.hearing_engine import HearingEngine
    from polymux.engine.write_engine import WriteEngine
    from polymux.families import generate_family_of
    from polymux.families.chat import ChatFamily
    from polymux.families.hearing import HearingFamily
    from polymux.loading import model_class_in, resolve

    for logging_of in (diffusers_logging, transformers_logging):
        logging_of.set_verbosity_error()  # the libraries repeat their warnings at every request
    name = model_class_in(resolve(config.model))
    if name is not None:
        family = generate_family_of(name)
        if config.stages.split_stages and family is not None and family.graph is not None:
            does = family.graph.stages[config.stage].does
            return WriteEngine.load(config) if does == "write" else DecodeEngine.load(config)
        if isinstance(family, ChatFamily):
            return ChatEngine.load(config)
        engine = HearingEngine if isinstance(family, HearingFamily) else GenerateEngine
        return engine.load(config)
    config.speech.check_unused()
    check_unchanged(config.scheduler, "acts only on models of transformers", ("merge_decoding",))
    return DiffusionEngine.load(config)


def _ranks_for(config: EngineConfig, give_up: GiveUp) -> StageEngine:
    """The engine on several ranks."""
    followers = Followers(config, give_up)  # before this process is busy with importing what they import, too

    from polymux.engine.ranks import leading  # torch

    return leading(config, followers, give_up)


def main(
    arguments: Sequence[str] | None = None,
    make_engine: MakeEngine = _engine_for,
    make_ranks: MakeRanks = _ranks_for,
) -> int:
    parser = argparse.ArgumentParser(prog="polymux.engine.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the socket to the API process")
    fd = parser.parse_args(arguments).fd
    logs.configure(LogConfig())
    faulthandler.enable()
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text("polymux-stage")  # the name that top shows
    return run(fd, make_engine, make_ranks)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: to take an interpreter with a model's libraries apart costs seconds, and a device in trouble may
    # hang there. What has to be put away is put away by the engine's close().
    os._exit(code)

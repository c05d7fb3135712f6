"""The process of a rank that is not rank 0: an engine that does what rank 0 says, step by step.

    python -m polymux.engine.follower --fd N

N is one end of a socket pair, at the other end of which is rank 0. What the engine makes is made for the results that
the ranks exchange; its outputs are nobody's. Imports torch only when it runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from polymux import logs
from polymux.config import EngineConfig, LogConfig
from polymux.engine.base import StageEngine
from polymux.engine.rank_link import Link
from polymux.engine.rank_messages import Answer, Begin, Tick, ToRank, Up, Warm, to_rank
from polymux.errors import PolymuxError, info_of
from polymux.importing import keep_imported, many_imports
from polymux.messages import Abort, Add, Fatal, Sleep, Stop, WakeUp

log = logging.getLogger(__name__)


class FollowingEngine(StageEngine, Protocol):
    """What a rank does its work with."""

    def forget_warm_up(self) -> None: ...


class Rank(Protocol):
    """What a rank is, once it has its model."""

    def run(self) -> None:
        """Until told to stop. Raises what makes it impossible to go on."""
        ...


MakeRank = Callable[[EngineConfig, int, Link[ToRank]], Rank]


class Follower:
    """The loop between the line to rank 0 and an engine."""

    def __init__(self, link: Link[ToRank], engine: FollowingEngine) -> None:
        self._link, self._engine = link, engine

    def run(self) -> None:
        """Until told to stop. Raises what makes it impossible to go on. The line stays open."""
        self._link.send(Up())
        self._link.watch()
        while not isinstance(message := self._link.receive(), Stop):
            self._take(message)
        self._engine.close()

    def _take(self, message: ToRank) -> None:
        match message:
            case Tick(orders):
                for order in orders:
                    self._obey(order)
                self._engine.step()
            case Warm():
                self._engine.forget_warm_up()
            case Sleep(level):
                self._link.send(self._answer(lambda: self._engine.sleep(level)))
            case WakeUp():
                self._link.send(self._answer(self._engine.wake_up))
            case _:
                raise TypeError(f"{type(message).__name__} out of its turn")

    def _obey(self, order: Add | Abort) -> None:
        if isinstance(order, Add):
            self._engine.add(order.request)
        else:
            self._engine.abort(order.request_id)

    def _answer(self, work: Callable[[], int | None]) -> Answer:
        while self._engine.busy:  # of what has ended everywhere, something may be left to be put away
            self._engine.step()
        try:
            return Answer(work() or 0)
        except PolymuxError as error:
            return Answer(0, error.info())


class Leader:
    """Rank 0's process."""

    pid = 0  # until it has said so

    def lost(self, error: PolymuxError) -> None:
        """It is gone, or hangs: then it is ended, so that whoever waits for it hears of it. So is this process."""
        log.error("rank 0 %s", error)
        if os.getppid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)
        os._exit(1)


def main(arguments: Sequence[str] | None = None, make: MakeRank | None = None) -> int:
    parser = argparse.ArgumentParser(prog="polymux.engine.follower", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the socket to rank 0")
    fd = parser.parse_args(arguments).fd
    logs.configure(LogConfig())
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when a rank ends
    return follow(socket.socket(fileno=fd), make)


def follow(end: socket.socket, make: MakeRank | None = None) -> int:
    """Be a rank until told to stop. Returns the exit code."""
    leader = Leader()
    link = Link(end, to_rank, leader.lost)
    try:
        begin = link.receive()
        if not isinstance(begin, Begin):
            raise TypeError(f"the first message is {type(begin).__name__}, not Begin")
        leader.pid = begin.leader
        logs.configure(begin.config.log)
        comm = Path("/proc/self/comm")
        if comm.exists():
            comm.write_text(f"polymux-rank{begin.rank}")
        (make or _following)(begin.config, begin.rank, link).run()
        link.close()
    except Exception as error:  # the border of the process: whatever it was, rank 0 must hear of it
        if not isinstance(error, PolymuxError):
            log.info("this rank cannot go on", exc_info=True)
        link.send(Fatal(info_of(error)))
        return 1
    return 0


def _following(config: EngineConfig, rank: int, link: Link[ToRank]) -> Rank:
    with many_imports():
        from polymux.engine.ranks import following, following_answers  # torch
        from polymux.loading import model_class_in, resolve

    keep_imported()
    if model_class_in(resolve(config.model)) is not None:
        return following_answers(config, rank, link)
    return Follower(link, following(config, rank, link))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as a stage process does, and why

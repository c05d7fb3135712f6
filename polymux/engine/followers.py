"""The other ranks of a stage, seen from rank 0: one line to each, and the processes at the other ends.

On one host they are started here, as commands in rank 0's process group: whoever ends that ends them. Knows what is
said to them, not what they do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from polymux.config import EngineConfig
from polymux.engine.rank_link import Link, framed
from polymux.engine.rank_messages import Answer, Begin, FromRank, Up, from_rank
from polymux.errors import PolymuxError, StageDeadError
from polymux.messages import Stop

log = logging.getLogger(__name__)

FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "polymux.engine.follower")
EXIT_WAIT_S = 3.0  # for ranks that were told to stop
CODE_WAIT_S = 1.0  # for the exit code of one that has closed its socket

LOOPBACK = "127.0.0.1"

GiveUp = Callable[[PolymuxError], None]


class RankProcess(Protocol):
    """The process of a rank, at the other end of a socket."""

    socket: socket.socket
    name: str

    def how_it_ended(self) -> str:
        """Of one that has closed its socket; "" if nobody knows."""
        ...

    def bury(self) -> None:
        """It was told to stop. Returns when it has, or somebody else sees to it."""
        ...


class ChildProcess:
    """A rank on this host, started here. `command` gets `--fd N` appended."""

    def __init__(self, command: Sequence[str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            words = [*command, "--fd", str(theirs.fileno())]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.name = f"process {self._process.pid}"

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(CODE_WAIT_S)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ""

    def bury(self) -> None:
        try:
            self._process.wait(EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_ranks(config: EngineConfig, command: Sequence[str] = FOLLOWER_COMMAND) -> list[RankProcess]:
    """Ranks 1 to n, on this host."""
    return [ChildProcess(command) for _ in range(1, config.parallel.world_size)]


class Followers:
    """Ranks 1 to n. `give_up` is called, in a thread, when one of them is lost or says that it cannot go on."""

    def __init__(
        self, config: EngineConfig, ranks: Sequence[RankProcess], give_up: GiveUp, host: str = LOOPBACK
    ) -> None:
        """`host`: the address of this process, as they reach it."""
        self.host = host
        self._give_up, self._ranks = give_up, ranks
        self._links: list[Link[FromRank]] = []
        for number, rank in enumerate(ranks, 1):
            self._links.append(Link(rank.socket, from_rank, partial(self._lost, number)))
            self._links[-1].send(Begin(config, number, os.getpid() if host == LOOPBACK else 0))

    def tell(self, message: msgspec.Struct) -> None:
        """All of them, in the order of the calls."""
        data = framed(message)
        for link in self._links:
            link.send_frame(data)

    def wait_until_up(self) -> None:
        """Returns when all have their models; from then on silence counts."""
        for link in self._links:
            message = link.receive()
            if not isinstance(message, Up):
                raise StageDeadError(f"a rank sent {type(message).__name__} before it was up")
        for link in self._links:
            link.watch()

    def answers(self) -> list[Answer]:
        """One from each, to what they were told."""
        found = [link.receive() for link in self._links]
        return [message for message in found if isinstance(message, Answer)]

    def close(self) -> None:
        """Tell them to stop; kill those that do not."""
        for link in self._links:
            link.close()
        self.tell(Stop())
        for rank in self._ranks:
            rank.bury()

    def _lost(self, number: int, error: PolymuxError) -> None:
        if not isinstance(error, StageDeadError):  # it has said itself what is wrong
            self._give_up(error)
            return
        rank = self._ranks[number - 1]
        how = rank.how_it_ended()
        self._give_up(StageDeadError(f"rank {number} ({rank.name}) {error}{': ' if how else ''}{how}"))

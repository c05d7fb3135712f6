"""The other ranks of a stage, seen from rank 0: their processes, and one line to each.

They are started as commands, in rank 0's process group: whoever ends that ends them. Knows what is said to them, not
what they do.
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

GiveUp = Callable[[PolymuxError], None]


class Followers:
    """Ranks 1 to n. `give_up` is called, in a thread, when one of them is lost or says that it cannot go on."""

    def __init__(self, config: EngineConfig, give_up: GiveUp, command: Sequence[str] = FOLLOWER_COMMAND) -> None:
        self._give_up = give_up
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Link[FromRank]] = []
        for rank in range(1, config.parallel.world_size):
            ours, theirs = socket.socketpair()
            with theirs:
                words = [*command, "--fd", str(theirs.fileno())]
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            self._processes.append(process)
            self._links.append(Link(ours, from_rank, partial(self._lost, rank)))
            self._links[-1].send(Begin(config, rank, os.getpid()))

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
        for process in self._processes:
            try:
                process.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _lost(self, rank: int, error: PolymuxError) -> None:
        if not isinstance(error, StageDeadError):  # it has said itself what is wrong
            self._give_up(error)
            return
        process = self._processes[rank - 1]
        how = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(CODE_WAIT_S)
            how = f": {signal.Signals(-code).name}" if code < 0 else f": exit code {code}"
        self._give_up(StageDeadError(f"rank {rank} (process {process.pid}) {error}{how}"))

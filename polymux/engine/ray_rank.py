"""One rank of a stage as an actor of Ray: the same loop as in a process of this host, over sockets.

Rank 0 listens; the process that asked for the stage comes to it, and so do the other ranks. Ray starts the actor, gives
it its device and ends it; nothing else goes through it. Imported by Ray's workers; imports torch only when it runs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

import ray

from polymux.config import EngineConfig, adopt
from polymux.engine import follower
from polymux.engine.base import StageEngine
from polymux.engine.engines import engine_for
from polymux.engine.followers import Followers, GiveUp
from polymux.engine.gathering import Gathering, come
from polymux.engine.stage import run
from polymux.stage_config import WorkerConfig
from polymux.version import VERSION

ASKER = 0  # the place of who asked for the stage; the others' are their ranks
GATHER_S = 60.0


@dataclass(frozen=True)
class Arrived:
    """Where Ray has put a rank."""

    host: str
    pid: int
    version: str  # of polymux there

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"


class RayRank:
    """The actor; one method of it runs at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        adopt(environment)
        self._host = str(ray.util.get_node_ip_address())
        self._gathering: Gathering | None = None

    def arrived(self) -> Arrived:
        return Arrived(self._host, os.getpid(), VERSION)

    def listen(self) -> tuple[tuple[str, int], bytes]:
        """The address at which this rank waits for the others, and what they must know."""
        self._gathering = Gathering(self._host)
        return self._gathering.address, self._gathering.secret

    def lead(self, names: list[str]) -> int:
        """Be rank 0 until told to stop. `names`: what the other ranks are called. Returns the exit code."""
        assert self._gathering is not None
        found = self._gathering.wait_for(range(len(names) + 1), GATHER_S)
        ranks = [_Elsewhere(found[number], name) for number, name in enumerate(names, 1)]

        def alone(config: EngineConfig) -> StageEngine:
            return engine_for(self._of_this_host(config))

        def together(config: EngineConfig, give_up: GiveUp) -> StageEngine:
            followers = Followers(config, ranks, give_up, self._host)

            from polymux.engine.ranks import leading  # torch

            return leading(config, followers, give_up)

        asker = found[ASKER]
        code = run(os.dup(asker.fileno()), alone, together)
        asker.shutdown(socket.SHUT_WR)
        return code

    def follow(self, address: tuple[str, int], secret: bytes, rank: int) -> int:
        """Be another rank until told to stop. Returns the exit code."""
        return follower.follow(come(address, secret, rank))

    def _of_this_host(self, config: EngineConfig) -> EngineConfig:
        """As if it had been started here; but what it hands on to other stages goes over the network."""
        stages = replace(config.stages, stage_connector="tcp", connector_host=self._host)
        return replace(config, stages=stages, workers=WorkerConfig())


class _Elsewhere:
    """A `RankProcess` that Ray has started, and ends."""

    def __init__(self, end: socket.socket, name: str) -> None:
        self.socket, self.name = end, name

    def how_it_ended(self) -> str:
        return ""

    def bury(self) -> None:
        """Its end of the socket closes when it is gone; the asker sees to it if that takes too long."""

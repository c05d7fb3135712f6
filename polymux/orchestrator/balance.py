"""Which replica of a stage gets a request. Each policy is a function; `POLICIES` names them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from polymux.orchestrator.replica import Replica
from polymux.request import Request

Policy = Callable[[Sequence[Replica], Request, int], Replica]
"""Of the replicas that are ready, at least one, that for a request; before it, there were so many others."""


def least_queue_length(ready: Sequence[Replica], request: Request, before: int) -> Replica:
    """The one that has the fewest outputs to make; of several, they take turns."""
    turn = before % len(ready)
    return min([*ready[turn:], *ready[:turn]], key=lambda replica: replica.load)


def round_robin(ready: Sequence[Replica], request: Request, before: int) -> Replica:
    return ready[before % len(ready)]


def at_random(ready: Sequence[Replica], request: Request, before: int) -> Replica:
    return random.choice(ready)


def session_affinity(ready: Sequence[Replica], request: Request, before: int) -> Replica:
    """Requests of one session go to one replica. When one dies, only its own sessions move."""
    if request.session_id is None:
        return least_queue_length(ready, request, before)
    session = request.session_id

    def drawn(replica: Replica) -> bytes:
        return hashlib.blake2b(f"{replica.index} {session}".encode(errors="surrogatepass")).digest()

    return max(ready, key=drawn)


POLICIES: dict[str, Policy] = {
    "least-queue-length": least_queue_length,
    "round-robin": round_robin,
    "random": at_random,
    "session-affinity": session_affinity,
}


class Pool:
    """The replicas of one stage."""

    def __init__(self, replicas: Sequence[Replica], policy: str) -> None:
        self.replicas = tuple(replicas)
        self._policy = POLICIES[policy]
        self._chosen = 0

    @property
    def phase(self) -> str:
        """That of the best of them."""
        return min((replica.phase for replica in self.replicas), key=("ready", "asleep", "loading", "dead").index)

    def choose(self, request: Request) -> Replica | None:
        """None: none is ready."""
        ready = [replica for replica in self.replicas if replica.phase == "ready"]
        if len(ready) < 2:
            return ready[0] if ready else None
        replica = self._policy(ready, request, self._chosen)
        self._chosen += 1
        return replica

"""A language model on several ranks, seen from rank 0: the engine that has the requests, and the others beside it.

Requests are rank 0's alone. What the others compute they are told step by step, by the engine's own runner; here is
what concerns the model as a whole. Knows neither how processes are started nor how the model is divided.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from polymux.engine.ar_engine import ArEngine
from polymux.engine.executor import LOSS_S
from polymux.engine.followers import Followers
from polymux.errors import PolymuxError
from polymux.messages import Sleep, WakeUp
from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Request, StageStats


class ArExecutor:
    """Implements `engine.base.StageEngine`."""

    def __init__(self, engine: ArEngine, followers: Followers) -> None:
        self.engine, self._followers = engine, followers

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def stats(self) -> StageStats:
        return self.engine.stats

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def warm_up(self) -> None:
        self.engine.warm_up()

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def taken(self, request_id: str) -> None:
        self.engine.taken(request_id)

    def feed(self, chunk: Chunk) -> None:
        self.engine.feed(chunk)

    def step(self) -> list[Event]:
        try:
            return self.engine.step()
        except Exception:
            # If a rank is lost, that is the reason, and whoever watches it ends this process meanwhile.
            time.sleep(LOSS_S)
            raise

    def sleep(self, level: int) -> int:
        self.engine.check_idle()  # before others hear of it
        return self._everywhere(Sleep(level), lambda: self.engine.sleep(level))

    def wake_up(self) -> None:
        self._everywhere(WakeUp(), self.engine.wake_up)

    def close(self) -> None:
        self._followers.close()
        self.engine.close()

    def _everywhere(self, message: Sleep | WakeUp, here: Callable[[], int | None]) -> int:
        """On all ranks: the bytes that others have of it. Raises what it raises here; where it does not raise the same
        everywhere, RuntimeError: then the ranks are no longer one model."""
        self._followers.tell(message)
        freed, problem = 0, None
        try:
            freed = here() or 0
        except PolymuxError as error:
            problem = error
        answers = self._followers.answers()
        failed = [answer.error for answer in answers if answer.error is not None]
        if problem is None and not failed:
            return freed + sum(answer.freed for answer in answers)
        if problem is None or len(failed) < len(answers):
            told = "; ".join(error.message for error in failed) or str(problem)
            raise RuntimeError(f"some of the ranks could not do what the others did: {told}")
        raise problem

"""A request at one stage: what of it is under way there. Knows neither the stage nor the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polymux.messages import ToStage


@dataclass(eq=False)
class Leg:
    """Of one request, at one replica."""

    send: Callable[[ToStage], None]  # to the replica
    outputs: int  # that the request wants
    unused: int = 0  # parts of what was made that whoever gets them has not used up; the stage may wait for that
    aborted: bool = False  # nobody waits for more than that the stage lets go

    @property
    def owes_news(self) -> bool:
        """Whether it is the stage that the next event waits for."""
        return self.aborted or self.unused == 0

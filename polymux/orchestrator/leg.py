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
    unread: int = 0  # chunks of the stage before that it has not used up
    more_to_come: bool = False  # the stage before has not ended
    aborted: bool = False  # nobody waits for more than that the stage lets go

    @property
    def owes_news(self) -> bool:
        """Whether it is the stage that the next event waits for."""
        return self.aborted or (self.unused == 0 and (self.unread > 0 or not self.more_to_come))

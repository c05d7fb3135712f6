"""Who decides on several ranks which calls run together: rank 0, and the others do as it says.

Sessions are the same everywhere and make the same calls, so the names of calls are all that needs to be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from polymux.diffusion.call import Call, CallOwner
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.followers import Followers
from polymux.engine.rank_link import Link
from polymux.engine.rank_messages import CallName, Round, ToRank
from polymux.errors import StageDeadError

Parts = Callable[[list[Call]], int]


class LeadScheduler:
    """Of rank 0: a `StepScheduler` whose decisions are told, where others wait for them."""

    def __init__(self, inner: StepScheduler, followers: Followers, places: int, parts: Parts) -> None:
        self.telling = False  # whether the others are in the same step, and wait
        self._inner, self._followers, self._places, self._parts = inner, followers, places, parts

    def submit(self, calls: Iterable[Call]) -> None:
        self._inner.submit(calls)

    def forget(self, owner: CallOwner) -> None:
        self._inner.forget(owner)

    def next_group(self) -> list[Call]:
        groups = self._inner.next_round(self._places, self._parts)
        if self.telling:
            self._followers.tell(Round([[name_of(call) for call in group] for group in groups]))
        return placed(groups)


class FollowScheduler:
    """Of another rank: keeps the calls until rank 0 names them."""

    def __init__(self, link: Link[ToRank]) -> None:
        self._link = link
        self._waiting: dict[CallName, Call] = {}

    def submit(self, calls: Iterable[Call]) -> None:
        self._waiting |= {name_of(call): call for call in calls}

    def forget(self, owner: CallOwner) -> None:
        self._waiting = {name: call for name, call in self._waiting.items() if call.owner is not owner}

    def next_group(self) -> list[Call]:
        """Raises StageDeadError if a call is not there: then the ranks are no longer in the same state."""
        message = self._link.receive()
        if not isinstance(message, Round):
            raise TypeError(f"{type(message).__name__} in place of a round")
        missing = [name for group in message.groups for name in group if name not in self._waiting]
        if missing:
            raise StageDeadError(f"the ranks have come apart: this one has no call {missing[0]}")
        return placed([[self._waiting.pop(name) for name in group] for group in message.groups])


def name_of(call: Call) -> CallName:
    owner = call.owner
    return (owner.request_id, owner.company, owner.index, call.number)


def placed(groups: list[list[Call]]) -> list[Call]:
    """All calls, each with the place of its group."""
    for place, group in enumerate(groups):
        for call in group:
            call.lane = place
    return [call for group in groups for call in group]

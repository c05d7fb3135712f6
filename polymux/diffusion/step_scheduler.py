"""Whose turn it is.

Calls wait in the order in which they were made. Each turn takes the oldest and whatever can run together with it, up
to a budget of latent tokens; a call of half the budget or more fills the device by itself and runs alone. So every
session gets one step per round however long it is, an incompatible call at the head only takes its own turn, and
nothing waits for ever. What a call does is not known here.

Where components move in and out of the device, calls whose component is there go first, so that requests in different
phases do not throw each other's weights out in every turn; but only for so long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from polymux.diffusion.call import Call, CallOwner

PATIENCE = 16  # turns that the oldest call may be passed over in a row


def _always(_: Call) -> bool:
    return True


def _alike(a: Call, b: Call) -> bool:
    same = a.component is b.component and a.method == b.method and a.adapters == b.adapters
    return same and a.owner.company == b.owner.company


class Scheduler(Protocol):
    """Takes the calls that are made, and says which of them run next."""

    def submit(self, calls: Iterable[Call]) -> None: ...

    def forget(self, owner: CallOwner) -> None: ...

    def next_group(self) -> list[Call]: ...


class StepScheduler:
    """Waiting calls, and the choice among them."""

    def __init__(
        self,
        budget: int,
        may_merge: Callable[[Call], bool],
        key: Callable[[Call], Hashable],
        tokens: Callable[[Call], int],
        ready: Callable[[Call], bool] = _always,
    ) -> None:
        self.budget, self.may_merge, self.key, self.tokens, self.ready = budget, may_merge, key, tokens, ready
        self.waiting: list[Call] = []
        self._made = 0
        self._passed_over = 0  # turns for which the oldest call has had to wait for ready ones

    def submit(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.order = self._made
            self._made += 1
            self.waiting.append(call)

    def forget(self, owner: CallOwner) -> None:
        """Drop the calls of a session that has ended."""
        self.waiting = [c for c in self.waiting if c.owner is not owner]

    def next_group(self) -> list[Call]:
        """The calls to run now, as one; empty when nothing waits."""
        return self._group(self._head()) if self.waiting else []

    def next_round(self, most: int, parts: Callable[[list[Call]], int]) -> list[list[Call]]:
        """Groups to run now, beside each other on `most` devices: one, if it has `parts` for all of them, or several
        of a denoiser's."""
        first = self.next_group()
        groups = [first] if first else []
        while groups and len(groups) < most and first[0].component.role == "denoiser" and parts(first) < most:
            head = next((c for c in self.waiting if _alike(c, first[0])), None)
            if head is None:
                break
            groups.append(self._group(head))
        return groups

    def _group(self, head: Call) -> list[Call]:
        group = [head]
        others = [c for c in self.waiting if c is not head and _alike(c, head)]
        if others and self.may_merge(head):
            key, total = self.key(head), self.tokens(head)
            for call in others:
                size = self.tokens(call)
                saturated = 2 * max(size, total // len(group)) >= self.budget
                if not saturated and total + size <= self.budget and self.key(call) == key:
                    group.append(call)
                    total += size
        taken = set(map(id, group))
        self.waiting = [c for c in self.waiting if id(c) not in taken]
        return group

    def _head(self) -> Call:
        """The oldest call whose component is ready; but the oldest of all if there is none or it has waited enough."""
        oldest = self.waiting[0]
        first = oldest
        if self._passed_over < PATIENCE:
            first = next((call for call in self.waiting if self.ready(call)), oldest)
        self._passed_over = 0 if first is oldest else self._passed_over + 1
        return first

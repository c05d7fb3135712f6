"""Whose turn it is.

Calls wait in the order in which they were made. Each turn takes the oldest and whatever can run together with it, up
to a budget of latent tokens; a call of half the budget or more fills the device by itself and runs alone. So every
session gets one step per round however long it is, an incompatible call at the head only takes its own turn, and
nothing waits for ever. What a call does is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from polymux.diffusion.call import Call, CallOwner


class StepScheduler:
    """Waiting calls, and the choice among them."""

    def __init__(
        self,
        budget: int,
        may_merge: Callable[[Call], bool],
        key: Callable[[Call], Hashable],
        tokens: Callable[[Call], int],
    ) -> None:
        self.budget, self.may_merge, self.key, self.tokens = budget, may_merge, key, tokens
        self.waiting: list[Call] = []
        self._made = 0

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
        if not self.waiting:
            return []
        head, group = self.waiting[0], [self.waiting[0]]
        others = [c for c in self.waiting[1:] if c.component is head.component and c.method == head.method]
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

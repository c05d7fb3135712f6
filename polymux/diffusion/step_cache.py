"""Denoisers that leave out what resembles the steps before: which backend is on which, for whom, and how often it acts.

Calls of such a component must not be merged: some requests would skip a step and others not. What a backend does stands
in `cache_backends` and `tea_cache`, and how requests are kept apart in `cached_denoiser`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polymux.diffusion.cache_backends import BACKENDS
from polymux.diffusion.cached_denoiser import CachedDenoiser, unsuited
from polymux.diffusion.call import Call, CallOwner
from polymux.diffusion.component import Component
from polymux.families.base import Family
from polymux.families.settings import not_validated
from polymux.step_caches import StepCacheSettings

log = logging.getLogger(__name__)


class StepCache:
    """Of the denoisers of one model. Without settings it does nothing."""

    def __init__(self, name: str = "none") -> None:
        self.name = name  # of the backend
        self.queries = self.hits = 0  # calls, and those that were shortened
        self._cached: dict[str, CachedDenoiser[Any]] = {}  # by component

    @classmethod
    def apply(cls, settings: StepCacheSettings | None, components: Sequence[Component], family: Family) -> StepCache:
        """Put the hooks in. Raises ConfigError, with everything as it was, if no denoiser can have them."""
        if settings is None:
            return cls()
        cache, backend = cls(settings.name), BACKENDS[settings.name]
        denoisers = [component for component in components if component.role == "denoiser"]
        problems = {component.name: backend.problem(component.module, settings, family) for component in denoisers}
        if all(problems.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in problems.items()) or "there is no denoiser"
            raise unsuited(settings.name, reasons)
        if settings.name not in family.step_caches.backends:
            raise unsuited(settings.name, not_validated(family))
        for component in denoisers:
            reason = problems[component.name]
            if reason is None:
                cache._cached[component.name] = backend(component.module, settings, family)
                component.look_up()
                reason = f"{settings.name}: {settings.summary}; its calls are not merged"
            log.info("cache: %s: %s", component.name, reason)
        return cache

    def __contains__(self, name: str) -> bool:
        """Whether the component of this name has a cache."""
        return name in self._cached

    @property
    def used(self) -> bool:
        return bool(self._cached)

    @contextmanager
    def active(self, call: Call) -> Iterator[None]:
        """Around a run of `call`."""
        cached = self._cached.get(call.component.name)
        if cached is None:
            yield
            return
        place = call.place
        if place is None or place.branch is None:
            what = f"which branch of guidance a call of {call.component.name} belongs to"
            raise unsuited(self.name, f"the pipeline does not say {what} (it opens no cache context)")
        name = f"{id(call.owner)} {place.branch}"
        with cached.active(name, place):
            yield
        self.queries += 1
        self.hits += cached.shortened(name)

    def forget(self, owner: CallOwner) -> None:
        """What was remembered of a session that has ended."""
        for cached in self._cached.values():
            cached.forget(f"{id(owner)} ")

    def undo(self) -> None:
        """The denoisers as they were."""
        for cached in self._cached.values():
            cached.undo()
        self._cached.clear()

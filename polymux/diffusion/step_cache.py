"""Denoisers that skip most of a step where it resembles the one before: diffusers' first-block cache.

Its hooks compare what the first block adds with what it added in the step before, and where that has changed by less
than a threshold they add what the other blocks added then. What they remember is kept by the name of a cache context.
A pipeline opens one around each call of its denoiser, named after the branch of guidance; here it is noted in the
session's coroutine, and the hooks see it, with the session in it, while the call runs. So neither sessions nor branches
share a memory, whatever order calls run in. Calls of such a component must not be merged.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import StateManager
from diffusers.models.cache_utils import CacheMixin
from greenlet import getcurrent

from polymux.diffusion.call import Call, CallOwner
from polymux.diffusion.component import Component, SessionGreenlet
from polymux.errors import ConfigError

log = logging.getLogger(__name__)


class StepCache:
    """Of the denoisers of one model. Without a threshold it does nothing."""

    def __init__(self) -> None:
        self.queries = self.hits = 0  # calls, and those of which only the first block ran
        self._cached: dict[str, _Cached] = {}  # by component

    @classmethod
    def apply(cls, threshold: float | None, components: Sequence[Component]) -> StepCache:
        """Put the hooks in. Raises ConfigError, with everything as it was, if no denoiser can have them."""
        cache = cls()
        if threshold is None:
            return cache
        denoisers = [component for component in components if component.role == "denoiser"]
        problems = {component.name: hindrance(component.module) for component in denoisers}
        if all(problems.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in problems.items()) or "there is no denoiser"
            raise ConfigError(f"--cache-backend first_block: {reasons}", param="cache_backend")
        for component in denoisers:
            if problems[component.name] is None:
                cache._cached[component.name] = _Cached(component.module, threshold)
            reason = problems[component.name] or f"first-block cache, threshold {threshold:g}; its calls are not merged"
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
        if call.branch is None:
            what = f"which branch of guidance a call of {call.component.name} belongs to"
            message = f"--cache-backend first_block: the pipeline does not say {what} (it opens no cache context)"
            raise ConfigError(message, param="cache_backend")
        name = f"{id(call.owner)} {call.branch}"
        with cached.original(name):
            yield
        self.queries += 1
        self.hits += cached.skipped(name)

    def forget(self, owner: CallOwner) -> None:
        """What was remembered of a session that has ended."""
        for cached in self._cached.values():
            cached.forget(f"{id(owner)} ")

    def undo(self) -> None:
        """The denoisers as they were."""
        for cached in self._cached.values():
            cached.undo()
        self._cached.clear()


class _Cached:
    """A denoiser with hooks."""

    def __init__(self, module: Any, threshold: float) -> None:
        self.module = module
        module.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        self.original: Callable[..., AbstractContextManager[None]] = module.cache_context
        hooks = [
            hook
            for child in module.modules()
            if (registry := child.__dict__.get("_diffusers_hook")) is not None
            for hook in registry.hooks.values()
        ]
        managers = [value for hook in hooks for value in vars(hook).values() if isinstance(value, StateManager)]
        self.managers = list({id(manager): manager for manager in managers}.values())
        self.reset: Callable[..., None] = module._reset_stateful_cache
        module.__dict__ |= {"cache_context": self._branch, "_reset_stateful_cache": self._reset}

    @contextmanager
    def _branch(self, name: str, **position: Any) -> Iterator[None]:
        """In place of the module's `cache_context`. In a session it is noted and acts when the call runs."""
        current = getcurrent()
        if not isinstance(current, SessionGreenlet):
            with self.original(name, **position):
                yield
            return
        before, current.branch = current.branch, f"{current.resets} {name}"
        try:
            yield
        finally:
            current.branch = before

    def _reset(self, *args: Any, **kwargs: Any) -> None:
        """In place of the module's own, which pipelines call at their end, and which forgets those of all others."""
        current = getcurrent()
        if isinstance(current, SessionGreenlet):
            current.resets += 1
        else:
            self.reset(*args, **kwargs)

    def skipped(self, name: str) -> bool:
        """Whether the last call under this name was answered by its first block."""
        return not all(manager._state_cache[name].should_compute for manager in self.managers)

    def forget(self, prefix: str) -> None:
        for manager in self.managers:
            for name in [name for name in manager._state_cache if name.startswith(prefix)]:
                del manager._state_cache[name]

    def undo(self) -> None:
        del self.module.__dict__["cache_context"], self.module.__dict__["_reset_stateful_cache"]
        self.module.disable_cache()


def hindrance(module: torch.nn.Module) -> str | None:
    """Why diffusers' hooks do not fit this denoiser; None: they do."""
    kind = type(module).__name__
    if not isinstance(module, CacheMixin):
        return f"diffusers has no caches for {kind}"
    lists = [child for name, child in module.named_children() if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS]
    blocks = [block for child in lists if isinstance(child, torch.nn.ModuleList) for block in child]
    if len(blocks) < 2:
        return f"{kind} has {len(blocks)} blocks where diffusers' hooks look for them, and two are needed"
    with_text = set()
    for block in blocks:
        try:
            known = TransformerBlockRegistry.get(type(block))
        except ValueError:
            return f"diffusers' hooks do not know the blocks of {kind} ({type(block).__name__})"
        with_text.add(known.return_encoder_hidden_states_index is not None)
    if len(with_text) > 1:  # what the last block returns cannot be compared with what the first one does
        return f"some blocks of {kind} return text and picture apart and some do not, which diffusers' hooks cannot mix"
    return None


def names_branches(pipeline: object) -> bool:
    """Whether the pipeline's own code opens cache contexts. Of modular pipelines nobody knows before they run."""
    functions = [inspect.unwrap(value) for value in vars(type(pipeline)).values() if inspect.isfunction(value)]
    return any("cache_context" in function.__code__.co_names for function in functions)

"""A denoiser with hooks of diffusers that leave out what resembles the steps before, and a memory for each request.

What hooks remember is kept by the name of a cache context. A pipeline opens one around each call of its denoiser, named
after the branch of guidance; here it is noted in the session's coroutine, and the hooks see it, with the session in it,
while the call runs. So neither sessions nor branches share a memory, whatever order calls run in.

A backend is a subclass: it says what fits it, puts its hooks in, and tells whether the last call was shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import torch
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import ModelHook, StateManager
from diffusers.models.cache_utils import CacheMixin
from greenlet import getcurrent

from polymux.diffusion.call import Place
from polymux.diffusion.component import SessionGreenlet
from polymux.errors import ConfigError
from polymux.families.base import Family
from polymux.step_caches import StepCacheSettings

Settings = TypeVar("Settings", bound=StepCacheSettings)


class CachedDenoiser(Generic[Settings]):
    """One backend on one denoiser."""

    def __init__(self, module: Any, settings: Settings, family: Family) -> None:
        self.module, self.settings, self.family = module, settings, family
        self.install()
        self.original: Callable[..., AbstractContextManager[None]] = module.cache_context
        self.hooks = [hook for child in module.modules() for hook in _hooks_of(child)]
        managers = [value for hook in self.hooks for value in vars(hook).values() if isinstance(value, StateManager)]
        self.managers = list({id(manager): manager for manager in managers}.values())
        self.reset: Callable[..., None] = module._reset_stateful_cache
        module.__dict__ |= {"cache_context": self._branch, "_reset_stateful_cache": self._reset}

    @classmethod
    def problem(cls, module: torch.nn.Module, settings: Settings, family: Family) -> str | None:
        """Why the backend does not fit this denoiser; None: it does."""
        raise NotImplementedError

    def install(self) -> None:
        """Put the hooks in."""
        raise NotImplementedError

    def remove(self) -> None:
        """Take the hooks out."""
        self.module.disable_cache()

    def prepare(self, name: str, place: Place) -> None:
        """Before the call at `place`, whose memory has this name."""

    def shortened(self, name: str) -> bool:
        """Whether the last call with this memory was."""
        raise NotImplementedError

    def state(self, manager: StateManager, name: str) -> Any:
        """What hooks remember under a name; None: nothing yet."""
        return manager._state_cache.get(name)

    @contextmanager
    def active(self, name: str, place: Place) -> Iterator[None]:
        """Around the call at `place`."""
        self.prepare(name, place)
        with self.original(name, step_index=place.step, num_inference_steps=place.steps):
            yield

    def forget(self, prefix: str) -> None:
        """The memories whose names begin so: their session has ended."""
        for manager in self.managers:
            for name in [name for name in manager._state_cache if name.startswith(prefix)]:
                del manager._state_cache[name]

    def undo(self) -> None:
        del self.module.__dict__["cache_context"], self.module.__dict__["_reset_stateful_cache"]
        self.remove()

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


def _hooks_of(module: torch.nn.Module) -> list[ModelHook]:
    registry = module.__dict__.get("_diffusers_hook")
    return [] if registry is None else list(registry.hooks.values())


def no_caches(module: torch.nn.Module) -> str | None:
    """Why there is no cache of diffusers for this model; None: there may be."""
    return None if isinstance(module, CacheMixin) else f"diffusers has no caches for {type(module).__name__}"


def blocks_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Where diffusers' hooks look for them."""
    lists = [child for name, child in module.named_children() if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS]
    return [block for child in lists if isinstance(child, torch.nn.ModuleList) for block in child]


def unknown_blocks(module: torch.nn.Module) -> str | None:
    """Why what all blocks add cannot be kept and added again; None: it can."""
    if (reason := no_caches(module)) is not None:
        return reason
    kind, blocks = type(module).__name__, blocks_of(module)
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


def unsuited(name: str, message: str) -> ConfigError:
    return ConfigError(f"--cache-backend {name}: {message}", param="cache_backend")

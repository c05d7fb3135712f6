"""The dual-block cache of the package cache-dit, with a memory for each request.

The package keeps what it remembers in contexts, by name, in one manager per denoiser; here each request and branch of
guidance has contexts of its own, which take their place while its call runs. It puts a `forward` of its own on the
denoiser, and its blocks in the place of the denoiser's while that runs; both are undone.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polymux.diffusion.cached_denoiser import CachedDenoiser, no_caches
from polymux.diffusion.call import Place
from polymux.families.base import Family
from polymux.step_caches import CacheDit


class CacheDitDenoiser(CachedDenoiser[CacheDit]):
    @classmethod
    def problem(cls, module: torch.nn.Module, settings: CacheDit, family: Family) -> str | None:
        if (reason := no_caches(module)) is not None:  # nor a cache context, which names branches
            return reason
        if importlib.util.find_spec("cache_dit") is None:
            return "the package `cache-dit` is not installed"
        from cache_dit import BlockAdapterRegister  # optional, and slow to import

        if not BlockAdapterRegister.is_supported(module):
            return f"cache-dit does not know {type(module).__name__}"
        return None

    def install(self) -> None:
        from cache_dit import DBCacheConfig, TaylorSeerCalibratorConfig
        from cache_dit.caching.cache_adapters import CachedAdapter

        module, settings = self.module, self.settings
        for name in logging.root.manager.loggerDict:
            if name.startswith("cache_dit."):  # each has a level of its own, and says much that users did not ask for
                logging.getLogger(name).setLevel(logging.ERROR)
        signature = inspect.signature(module.forward)
        self._own_forward = module.__dict__.get("forward")
        fields = {field: getattr(settings, field) for field in settings.__struct_fields__}
        predicts, order = fields.pop("enable_taylorseer"), fields.pop("taylorseer_order")
        calibrator = TaylorSeerCalibratorConfig(taylorseer_order=order) if predicts else None
        # Branches of guidance have contexts of their own already, and steps are counted in these.
        config = DBCacheConfig(**fields, enable_separate_cfg=False)
        CachedAdapter.apply(module, cache_config=config, calibrator_config=calibrator)
        module.forward.__signature__ = signature
        self._manager = module._context_manager
        contexts = self._manager._cached_context_manager.values()
        self._blueprints = [copy.deepcopy(context._init_kwargs) for context in contexts]
        self._memories: dict[str, dict[str, Any]] = {}

    def remove(self) -> None:
        from cache_dit.caching.cache_adapters import CachedAdapter

        CachedAdapter.maybe_release_hooks(self.module)
        del self.module.__dict__["forward"]
        if self._own_forward is not None:
            self.module.__dict__["forward"] = self._own_forward

    @contextmanager
    def active(self, name: str, place: Place) -> Iterator[None]:
        idle = self._manager._cached_context_manager
        if name not in self._memories:
            self._manager._cached_context_manager = self._memories[name] = {}
            for blueprint in self._blueprints:
                self._manager.new_context(**copy.deepcopy(blueprint))
        self._manager._cached_context_manager = memory = self._memories[name]
        before = _cached_steps(memory)
        try:
            yield
        finally:
            self._manager._cached_context_manager, self._manager._current_context = idle, None
        self._shortened = _cached_steps(memory) > before

    def shortened(self, name: str) -> bool:
        return self._shortened

    def forget(self, prefix: str) -> None:
        for name in [name for name in self._memories if name.startswith(prefix)]:
            del self._memories[name]


def _cached_steps(memory: dict[str, Any]) -> int:
    return sum(len(context.cached_steps) for context in memory.values())

"""Each backend that leaves out parts of denoising steps, on diffusers' own hooks: what fits it, and what it needs.

How memories are kept apart is not known here. TeaCache, which diffusers lacks, has a module of its own.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import diffusers.hooks.mag_cache as diffusers_ratios
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks._common import _ATTENTION_CLASSES
from diffusers.hooks.mag_cache import MagCacheBlockHook, MagCacheHeadHook
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastHook, PyramidAttentionBroadcastState

from polymux.diffusion.cache_dit_backend import CacheDitDenoiser
from polymux.diffusion.cached_denoiser import CachedDenoiser, blocks_of, no_caches, unknown_blocks, unsuited
from polymux.diffusion.call import Place
from polymux.diffusion.tea_cache import TeaDenoiser
from polymux.families.base import Family
from polymux.step_caches import AttentionBroadcast, FirstBlock, MagCache, TaylorSeer

log = logging.getLogger(__name__)

ATTENTION = r".*blocks\.\d+\.attn\d?"  # what diffusers calls attention in blocks; its own patterns miss some
WHOLE = (torch.float32, torch.bfloat16, torch.float16)  # types to compute in
MANY_STEPS = 1 << 20  # a measurement that never ends: diffusers' prints its result and forgets it


class FirstBlockDenoiser(CachedDenoiser[FirstBlock]):
    @classmethod
    def problem(cls, module: torch.nn.Module, settings: FirstBlock, family: Family) -> str | None:
        return unknown_blocks(module)

    def install(self) -> None:
        self.module.enable_cache(FirstBlockCacheConfig(threshold=self.settings.threshold))

    def shortened(self, name: str) -> bool:
        return not all(self.state(manager, name).should_compute for manager in self.managers)


class MagDenoiser(CachedDenoiser[MagCache]):
    """Ratios are of a whole schedule: each call gets those for the steps of its request, at the step that it is."""

    @classmethod
    def problem(cls, module: torch.nn.Module, settings: MagCache, family: Family) -> str | None:
        if (reason := unknown_blocks(module)) is not None:
            return reason
        if settings.mag_ratios is None and not settings.mag_calibrate and family.step_caches.mag_ratios is None:
            return f"no mag_ratios are known for {family.name}: measure them with mag_calibrate (docs/step_cache.md)"
        return None

    def install(self) -> None:
        self._for = functools.lru_cache(maxsize=64)(self._config)
        self.module.enable_cache(self._for(1))

    def _config(self, steps: int) -> MagCacheConfig:
        settings = self.settings
        if settings.mag_calibrate:
            return MagCacheConfig(calibrate=True, num_inference_steps=MANY_STEPS)
        ratios: Any = settings.mag_ratios
        if ratios is None:
            assert self.family.step_caches.mag_ratios is not None
            ratios = vars(diffusers_ratios)[self.family.step_caches.mag_ratios]
        return MagCacheConfig(
            threshold=settings.mag_threshold,
            # A ratio of exactly 1 says that nothing is lost, which a threshold of 0 would still let through.
            max_skip_steps=settings.mag_max_skip_steps if settings.mag_threshold else 0,
            retention_ratio=settings.mag_retention_ratio,
            num_inference_steps=steps,
            mag_ratios=ratios if isinstance(ratios, torch.Tensor) else list(ratios),
        )

    def prepare(self, name: str, place: Place) -> None:
        config = self._for(_steps(place, self.settings.name))
        for hook in self.hooks:
            if isinstance(hook, (MagCacheHeadHook, MagCacheBlockHook)):
                hook.config = config
        if self.settings.mag_calibrate:
            return
        for manager in self.managers:
            if (state := self.state(manager, name)) is not None:
                state.step_index = place.step  # one of two denoisers does not see all steps

    def shortened(self, name: str) -> bool:
        return not all(self.state(manager, name).should_compute for manager in self.managers)

    def forget(self, prefix: str) -> None:
        if self.settings.mag_calibrate:
            for manager in self.managers:
                self._report([s.calibration_ratios for n, s in manager._state_cache.items() if n.startswith(prefix)])
        super().forget(prefix)

    def _report(self, branches: list[list[float]]) -> None:
        """The mean over branches of guidance, ready to be given back."""
        if branches and all(len(ratios) > 2 for ratios in branches):  # a warm-up has fewer
            ratios = [round(sum(step) / len(step), 5) for step in zip(*branches, strict=False)]
            log.info("mag_cache: measured: --cache-config '%s'", json.dumps({"mag_ratios": ratios}))


class TaylorSeerDenoiser(CachedDenoiser[TaylorSeer]):
    @classmethod
    def problem(cls, module: torch.nn.Module, settings: TaylorSeer, family: Family) -> str | None:
        if (reason := no_caches(module)) is not None:
            return reason
        if settings.use_lite_mode:
            if "proj_out" not in dict(module.named_children()) or not blocks_of(module):
                return f"the lite mode needs blocks and a last layer `proj_out`, which {type(module).__name__} lacks"
        elif not _attention_layers(module):
            return f"{type(module).__name__} has no attention in blocks that diffusers' hooks know"
        return None

    def install(self) -> None:
        settings, dtype = self.settings, self.module.dtype
        self.module.enable_cache(
            TaylorSeerCacheConfig(
                cache_interval=settings.cache_interval,
                disable_cache_before_step=settings.disable_cache_before_step,
                disable_cache_after_step=settings.disable_cache_after_step,
                max_order=settings.max_order,
                taylor_factors_dtype=dtype if dtype in WHOLE else torch.bfloat16,  # else of weights alone
                cache_identifiers=None if settings.use_lite_mode else [ATTENTION],
                use_lite_mode=settings.use_lite_mode,
            )
        )

    def shortened(self, name: str) -> bool:
        states = [self.state(manager, name) for manager in self.managers]
        return any(state is not None and state.last_update_step != state.current_step for state in states)


class BroadcastDenoiser(CachedDenoiser[AttentionBroadcast]):
    """Its hooks have one memory each: it is changed before each call."""

    @classmethod
    def problem(cls, module: torch.nn.Module, settings: AttentionBroadcast, family: Family) -> str | None:
        if (reason := no_caches(module)) is not None:
            return reason
        return None if _attention_layers(module) else f"{type(module).__name__} has no attention that diffusers knows"

    def install(self) -> None:
        self._timestep = 0.0
        self._memories: dict[str, list[PyramidAttentionBroadcastState]] = {}
        self._kept: list[Any] = []  # what was remembered before the call
        fields = {field: getattr(self.settings, field) for field in self.settings.__struct_fields__}
        self.module.enable_cache(
            PyramidAttentionBroadcastConfig(**fields, current_timestep_callback=lambda: self._timestep)
        )

    def prepare(self, name: str, place: Place) -> None:
        if place.timestep is None:
            raise unsuited(self.settings.name, "the pipeline does not say at which timestep it is")
        self._timestep = float(place.timestep)
        layers = [hook for hook in self.hooks if isinstance(hook, PyramidAttentionBroadcastHook)]
        if not layers:
            raise unsuited(self.settings.name, "no attention layer is of a kind that has a skip range")
        memory = self._memories.setdefault(name, [PyramidAttentionBroadcastState() for _ in layers])
        self._kept = [state.cache for state in memory]
        for hook, state in zip(layers, memory, strict=True):
            hook.state = state

    def shortened(self, name: str) -> bool:
        return any(
            old is not None and state.cache is old for state, old in zip(self._memories[name], self._kept, strict=True)
        )

    def forget(self, prefix: str) -> None:
        self._kept = []
        for hook in self.hooks:
            if isinstance(hook, PyramidAttentionBroadcastHook):
                hook.state = PyramidAttentionBroadcastState()
        for name in [name for name in self._memories if name.startswith(prefix)]:
            del self._memories[name]


def _attention_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer for block in blocks_of(module) for layer in block.children() if isinstance(layer, _ATTENTION_CLASSES)]


def _steps(place: Place, name: str) -> int:
    if place.steps < 1:
        raise unsuited(name, "the pipeline does not say how many steps it makes")
    return place.steps


BACKENDS: dict[str, type[CachedDenoiser[Any]]] = {
    "first_block": FirstBlockDenoiser,
    "mag_cache": MagDenoiser,
    "tea_cache": TeaDenoiser,
    "taylorseer": TaylorSeerDenoiser,
    "pab": BroadcastDenoiser,
    "cache_dit": CacheDitDenoiser,
}

"""What may be chosen for steps that resemble the one before: the backends, and the settings of each.

The names of settings are those that diffusers or the backend's authors gave them. Not what can run where.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from polymux.errors import ConfigError

Name = Literal["first_block", "mag_cache", "tea_cache", "taylorseer", "pab", "cache_dit"]
Threshold = Annotated[float, Meta(ge=0, lt=1e9)]
Count = Annotated[int, Meta(ge=0)]
Interval = Annotated[int, Meta(ge=1)]
Ratios = Annotated[tuple[Annotated[float, Meta(gt=0, lt=1e9)], ...], Meta(min_length=1)]
Timestep = Annotated[float, Meta(ge=0)]
Coefficient = Annotated[float, Meta(gt=-1e30, lt=1e30)]  # nor what is no number


class StepCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one backend."""

    name: ClassVar[Name]

    @property
    def summary(self) -> str:
        """All that is set, in one line."""
        values = {field: getattr(self, field) for field in self.__struct_fields__}
        return ", ".join(f"{field} {value}" for field, value in values.items() if value is not None)


class FirstBlock(StepCacheSettings, frozen=True):
    """A step is left out where what the first block adds has changed by less than `threshold` of it."""

    name: ClassVar[Name] = "first_block"
    threshold: Threshold = 0.05


class MagCache(StepCacheSettings, frozen=True):
    """Steps are left out as long as ratios that were measured beforehand say that little is lost."""

    name: ClassVar[Name] = "mag_cache"
    mag_threshold: Threshold = 0.24
    mag_max_skip_steps: Count = 5
    mag_retention_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    mag_ratios: Ratios | None = None
    mag_calibrate: bool = False


class TeaCache(StepCacheSettings, frozen=True):
    """Steps are left out as long as a polynomial of how the timestep changes the input says that little is lost."""

    name: ClassVar[Name] = "tea_cache"
    rel_l1_thresh: Threshold = 0.2
    coefficients: Annotated[tuple[Coefficient, ...], Meta(min_length=1, max_length=9)] | None = None
    calibrate: bool = False


class TaylorSeer(StepCacheSettings, frozen=True):
    """Between steps that are computed, results are predicted from how they have changed."""

    name: ClassVar[Name] = "taylorseer"
    cache_interval: Interval = 5
    disable_cache_before_step: Count = 3
    disable_cache_after_step: Count | None = None
    max_order: Count = 1
    use_lite_mode: bool = True


class AttentionBroadcast(StepCacheSettings, frozen=True):
    """Pyramid attention broadcast: attention of a layer is computed once per so many steps."""

    name: ClassVar[Name] = "pab"
    spatial_attention_block_skip_range: Interval | None = 2
    temporal_attention_block_skip_range: Interval | None = None
    cross_attention_block_skip_range: Interval | None = None
    spatial_attention_timestep_skip_range: tuple[Timestep, Timestep] = (100, 800)
    temporal_attention_timestep_skip_range: tuple[Timestep, Timestep] = (100, 800)
    cross_attention_timestep_skip_range: tuple[Timestep, Timestep] = (100, 800)


class CacheDit(StepCacheSettings, frozen=True):
    """Of the package cache-dit: blocks between the first and the last ones are left out where the first ones say so."""

    name: ClassVar[Name] = "cache_dit"
    Fn_compute_blocks: Interval = 1
    Bn_compute_blocks: Count = 0
    residual_diff_threshold: Threshold = 0.24
    max_warmup_steps: Count = 4
    max_cached_steps: Annotated[int, Meta(ge=-1)] = -1
    max_continuous_cached_steps: Annotated[int, Meta(ge=-1)] = 3
    enable_taylorseer: bool = False
    taylorseer_order: Interval = 1


_ALL = (FirstBlock, MagCache, TeaCache, TaylorSeer, AttentionBroadcast, CacheDit)
SETTINGS: tuple[type[StepCacheSettings], ...] = _ALL
NAMES: tuple[str, ...] = tuple(settings.name for settings in SETTINGS)


def settings_of(name: str, config: dict[str, Any]) -> StepCacheSettings:
    """Raises ConfigError, which says what is wrong and what is allowed."""
    kind = next(settings for settings in SETTINGS if settings.name == name)
    known = ", ".join(kind.__struct_fields__)
    try:
        made = msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cache_config: {error}; {name} knows {known}", param="cache_config") from None
    problem = _contradiction(made) or _idle_of_measuring(made, config)
    if problem is not None:
        raise ConfigError(f"cache_config: {problem}", param="cache_config")
    return made


def _contradiction(settings: StepCacheSettings) -> str | None:
    match settings:
        case MagCache(mag_calibrate=True, mag_ratios=tuple()):
            return "mag_calibrate measures mag_ratios, and both are given"
        case TeaCache(calibrate=True, coefficients=tuple()):
            return "calibrate measures coefficients, and both are given"
        case AttentionBroadcast(
            spatial_attention_block_skip_range=None,
            temporal_attention_block_skip_range=None,
            cross_attention_block_skip_range=None,
        ):
            return "one of the skip ranges must be a number"
        case AttentionBroadcast():
            return _idle_range(settings)
        case TaylorSeer(disable_cache_before_step=first, disable_cache_after_step=int(end)) if end <= first:
            return f"disable_cache_after_step {end}: must be above disable_cache_before_step {first}"
        case CacheDit(enable_taylorseer=False) if settings.taylorseer_order != CacheDit().taylorseer_order:
            return "taylorseer_order acts only with enable_taylorseer"
    return None


def _idle_range(settings: AttentionBroadcast) -> str | None:
    """What is wrong with a range of timesteps that would leave out nothing."""
    unchanged = AttentionBroadcast()
    for kind in ("spatial", "temporal", "cross"):
        steps, timesteps = f"{kind}_attention_block_skip_range", f"{kind}_attention_timestep_skip_range"
        low, high = getattr(settings, timesteps)
        if low >= high:
            return f"{timesteps} [{low:g}, {high:g}]: the first must be below the second"
        if getattr(settings, steps) is None and (low, high) != getattr(unchanged, timesteps):
            return f"{timesteps} acts only with {steps}"
    return None


def _idle_of_measuring(settings: StepCacheSettings, given: Collection[str]) -> str | None:
    """What is wrong with settings of what is left out beside one that leaves nothing out."""
    idle: tuple[str, ...] = ()
    match settings:
        case MagCache(mag_calibrate=True):
            idle, measures = ("mag_threshold", "mag_max_skip_steps", "mag_retention_ratio"), "mag_calibrate"
        case TeaCache(calibrate=True):
            idle, measures = ("rel_l1_thresh",), "calibrate"
    found = next((name for name in idle if name in given), None)
    return None if found is None else f"{found} does not act with {measures}, which leaves nothing out"

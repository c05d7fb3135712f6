"""The knobs of where weights are kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from polymux.errors import ConfigError
from polymux.knobs import Checked, conflict, flag_of, knob


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Checked):
    """Memory: where weights are kept when they are not in use (docs/offload.md)"""

    enable_cpu_offload: bool = knob(False, "keep encoders and denoisers on the host, each on the device while it runs")
    enable_layerwise_offload: bool = knob(False, "stream the denoisers' blocks from the host while they compute")
    enable_distributed_layerwise_offload: bool = knob(
        False, "layerwise, for several ranks or several engines of one host"
    )
    vae_use_tiling: bool = knob(False, "the autoencoder works on large pictures and videos tile by tile")
    vae_use_slicing: bool = knob(False, "the autoencoder works on one picture of a batch at a time")
    gpu_memory_limit_gib: float | Literal["auto"] | None = knob(
        None, "use at most this much device memory and choose what to offload; auto: what is free", minimum=0
    )
    dlo_resident_layers: int = knob(0, "layerwise: this many blocks stay on the device", minimum=0)
    dlo_prefetch_layers: int = knob(
        2, "layerwise: blocks that are fetched ahead; each takes the device memory of the largest block", minimum=0
    )
    dlo_use_allgather: bool | None = knob(
        None,
        "distributed: each rank keeps its part of every block, and ranks rebuild them (default, if there are several)",
        off="--dlo-no-use-allgather",
    )
    dlo_enable_runtime_cache: bool = knob(
        False, "distributed: keep final weights in one file that all engines of this host map"
    )
    dlo_runtime_cache_dir: str | None = knob(None, "where the runtime cache is (default: in the user's cache folder)")
    dlo_runtime_cache_lock_timeout: float = knob(
        600.0, "seconds to wait for another engine that writes the entry; then go on without", minimum=0
    )
    dlo_runtime_cache_pin_limit_gib: float = knob(
        0.0, "register a cached denoiser with the device if it is not larger than this; 0: never", minimum=0
    )
    dlo_runtime_cache_limit_gib: float | None = knob(
        None, "evict the least recently used entries of the runtime cache above this size", minimum=0
    )
    dlo_runtime_cache_verify: str = knob(
        "size", "what is checked before an entry is used: sizes and headers, or all bytes", choices=("size", "full")
    )

    STRATEGIES: ClassVar[tuple[str, ...]] = (
        "enable_cpu_offload",
        "enable_layerwise_offload",
        "enable_distributed_layerwise_offload",
        "gpu_memory_limit_gib",
    )
    NEEDS: ClassVar[dict[str, tuple[str, ...]]] = {  # a knob, and those of which one must be set beside it
        "dlo_resident_layers": ("enable_layerwise_offload", "enable_distributed_layerwise_offload"),
        "dlo_prefetch_layers": (
            "enable_layerwise_offload",
            "enable_distributed_layerwise_offload",
            "gpu_memory_limit_gib",
        ),
        "dlo_use_allgather": ("enable_distributed_layerwise_offload",),
        "dlo_enable_runtime_cache": ("enable_distributed_layerwise_offload",),
        "dlo_runtime_cache_dir": ("dlo_enable_runtime_cache",),
        "dlo_runtime_cache_lock_timeout": ("dlo_enable_runtime_cache",),
        "dlo_runtime_cache_pin_limit_gib": ("dlo_enable_runtime_cache",),
        "dlo_runtime_cache_limit_gib": ("dlo_enable_runtime_cache",),
        "dlo_runtime_cache_verify": ("dlo_enable_runtime_cache",),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        strategies = [name for name in self.STRATEGIES if name in given]
        if len(strategies) > 1:
            raise conflict(strategies[0], strategies[1], "each is a strategy of its own; choose one")
        for name, needed in self.NEEDS.items():
            if name in given and not given.intersection(needed):
                raise ConfigError(f"{flag_of(name)} acts only with {' or '.join(map(flag_of, needed))}", param=name)
        if self.dlo_enable_runtime_cache and self.dlo_use_allgather:
            reason = "the cache holds complete blocks, which are not gathered"
            raise conflict("dlo_enable_runtime_cache", "dlo_use_allgather", reason)

    @property
    def offloads(self) -> bool:
        """Whether weights may have to be on the host: then they are loaded there first."""
        return any(getattr(self, name) for name in self.STRATEGIES)

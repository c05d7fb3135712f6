"""The settings of the runtime cache, as a loader of denoisers."""

from __future__ import annotations

from polymux.config import EngineConfig, runtime_cache_dir
from polymux.diffusion.component import is_denoiser
from polymux.loading import CachedLoader
from polymux.memory.runtime_cache import CacheSettings, RuntimeCache
from polymux.quantization.quantizer import Quantizer


def cached_loader(config: EngineConfig, quantizer: Quantizer | None = None) -> CachedLoader | None:
    """What loads the denoisers, and has them quantized, if the runtime cache is asked for."""
    memory = config.memory
    if not memory.dlo_enable_runtime_cache:
        return None
    limit = memory.dlo_runtime_cache_limit_gib
    settings = CacheSettings(
        root=runtime_cache_dir(memory.dlo_runtime_cache_dir),
        lock_timeout_s=memory.dlo_runtime_cache_lock_timeout,
        limit=None if limit is None else int(limit * 2**30),
        verify_full=memory.dlo_runtime_cache_verify == "full",
        threads=config.model.num_weight_load_threads,
    )
    return CachedLoader(RuntimeCache(settings), is_denoiser, label=config.model.model, quantizer=quantizer)

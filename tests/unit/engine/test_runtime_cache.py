"""An engine that streams from the runtime cache makes the same pictures, and a second one loads no denoiser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.config import EngineConfig
from polymux.engine.cached_loader import cached_loader
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import cached
from polymux.media.wire import from_wire
from polymux.memory.runtime_cache import CacheSettings, RuntimeCache
from polymux.prompts import request_of
from polymux.request import Finished, OmniDiffusionSamplingParams

Checkpoint = Callable[..., Path]


def engine(folder: Path, **flags: Any) -> DiffusionEngine:
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(folder), **flags))


def picture(engine: DiffusionEngine) -> np.ndarray[Any, Any]:
    video = engine.family.modality == "video"
    size = dict(height=64, width=64, num_frames=5 if video else None)
    steps = 4 if video else 1  # a second denoiser has its turn in the later steps
    params = OmniDiffusionSamplingParams(seed=1, num_inference_steps=steps, output_type="np", **size)
    engine.add(request_of("a cat", params, "one"))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return np.asarray(from_wire(event.outputs[0][0]))


@pytest.mark.parametrize("name", ["flux-dev", "wan22-t2v-moe"])
def test_two_engines_share_what_one_has_loaded(
    tiny_checkpoint: Checkpoint, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(name)
    plain = engine(folder)
    wanted = picture(plain)
    plain.close()
    flags: dict[str, Any] = dict(
        enable_distributed_layerwise_offload=True,
        dlo_enable_runtime_cache=True,
        dlo_runtime_cache_dir=str(tmp_path / "cache"),
        dlo_resident_layers=1,
    )
    first = engine(folder, **flags)
    assert "runtime cache" in first.weights.describe()
    monkeypatch.setattr(cached, "load_model", None)  # a call of it would fail
    second = engine(folder, **flags)
    asked = first.stats.cache_queries["runtime_cache"]
    assert first.stats.cache_hits["runtime_cache"] == 0
    assert asked == sum(c.role == "denoiser" for c in first.components)
    assert second.stats.cache_hits["runtime_cache"] == asked
    store = RuntimeCache(CacheSettings(root=tmp_path / "cache")).store
    assert [entry.in_use for entry in store.entries()] == [True] * len(store.digests())
    for own in (first, second):
        np.testing.assert_allclose(picture(own), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    first.close()
    assert all(entry.in_use for entry in store.entries())
    second.close()
    assert not any(entry.in_use for entry in store.entries())


def test_the_flags_are_the_settings(tmp_path: Path) -> None:
    loader = cached_loader(
        EngineConfig.from_flat(
            model="some/model",
            enable_distributed_layerwise_offload=True,
            dlo_enable_runtime_cache=True,
            dlo_runtime_cache_dir=str(tmp_path),
            dlo_runtime_cache_lock_timeout=7.0,
            dlo_runtime_cache_limit_gib=1.5,
            dlo_runtime_cache_verify="full",
            num_weight_load_threads=3,
        )
    )
    assert loader is not None
    assert loader.cache.settings == CacheSettings(
        root=tmp_path, lock_timeout_s=7.0, limit=3 * 2**29, verify_full=True, threads=3
    )
    assert cached_loader(EngineConfig.from_flat(model="some/model")) is None

"""Every family with caches of denoising steps: where they leave nothing out, nothing changes, and nothing stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.pipeline_call import declared_family
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.families import all_families
from polymux.loading import load_pipeline
from polymux.testing.tiny import TINY

from .reference import distance, request
from .test_families import arrays, drive

# By family: a tiny checkpoint.
CHECKPOINTS = {
    "flux": "flux-dev",
    "qwen-image": "qwen-image",
    "hunyuan-image-2.1": "hunyuan-image21",
    "hunyuan-video": "hunyuan-video-t2v",
    "mochi": "mochi",
    "cogview4": "cogview4",
    "cogvideox": "cogvideox",
    "ltx-video": "ltx-video",
    "ltx-video-i2v": "ltx-video-i2v",
    "ltx-2": "ltx2",
    "flux2": "flux2-klein",
    "wan": "wan22-t2v-moe",
    "wan-i2v": "wan21-i2v",
    "wan-vace": "wan21-vace",
    "skyreels-v2": "skyreels-v2-t2v",
    "ovis-image": "ovis-image",
    "longcat-image": "longcat-image",
}
NOTHING: dict[str, dict[str, Any]] = {  # is left out with these
    "first_block": {"threshold": 0},
    "mag_cache": {"mag_threshold": 0, "mag_ratios": [1.0]},
    "tea_cache": {"rel_l1_thresh": 0, "coefficients": [1.0, -1.0]},  # estimates are below zero
    "taylorseer": {"cache_interval": 1},
    "pab": {"spatial_attention_block_skip_range": 1, "spatial_attention_timestep_skip_range": [0, 1001]},
    "cache_dit": {"residual_diff_threshold": 0, "max_warmup_steps": 0},
}
MUCH: dict[str, dict[str, Any]] = {  # of each step after the first, where it may
    "first_block": {"threshold": 100},
    "mag_cache": {"mag_threshold": 100, "mag_ratios": [1.01], "mag_retention_ratio": 0},
    "tea_cache": {"rel_l1_thresh": 100, "coefficients": [1.0, 0.0]},
    "taylorseer": {"cache_interval": 2, "disable_cache_before_step": 1},
    "pab": {"spatial_attention_timestep_skip_range": [0, 1001]},
    "cache_dit": {"residual_diff_threshold": 1, "max_warmup_steps": 1},
}


def test_every_family_with_caches_is_here() -> None:
    assert set(CHECKPOINTS) == {family.name for family in all_families() if family.step_caches.backends}


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_with_and_without(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    name = CHECKPOINTS[family]
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)))
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(TINY[name].load))
    asked = request(dict(TINY[name].call) | {"num_inference_steps": 3}, "a", 1, "latent")

    def run(**cache: Any) -> tuple[Any, dict[str, int]]:
        flat = EngineConfig.from_flat(model=name, max_num_seqs=1, **cache)
        engine = DiffusionEngine(flat, pipeline, torch.device("cpu"))
        engine.add(asked)
        made, hits = arrays(drive(engine)["a"]), engine.stats.cache_hits
        engine.close()
        return made, hits

    plain, _ = run()
    backends = declared_family(pipeline).step_caches.backends
    for backend in backends:
        if backend == "cache_dit":
            pytest.importorskip("cache_dit")
        got, hits = run(cache_backend=backend, cache_config=NOTHING[backend])
        assert (distance(got, plain), hits[backend]) == (0.0, 0), backend
        got, hits = run(cache_backend=backend, cache_config=MUCH[backend])
        assert distance(got, plain) > 1e-4 and hits[backend] > 0, backend
    assert distance(run()[0], plain) == 0.0

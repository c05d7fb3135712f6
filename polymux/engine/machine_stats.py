"""The numbers of a stage that are not about its requests: memory, offload, caches."""

from __future__ import annotations

import torch

from polymux.diffusion.encoder_cache import EncoderCache
from polymux.diffusion.step_cache import StepCache
from polymux.engine.model import Model
from polymux.memory.measure import device_bytes, resident_bytes
from polymux.request import StageStats


def machine_stats(model: Model | None, encoded: EncoderCache, steps: StepCache, device: torch.device) -> StageStats:
    """With the caches that are in use, by name: what has been looked for in them, and what was there."""
    queries, hits = (dict(model.cache_queries), dict(model.cache_hits)) if model else ({}, {})
    if encoded.limit:
        queries["prompt_cache"], hits["prompt_cache"] = encoded.queries, encoded.hits
    if steps.used:
        queries["first_block"], hits["first_block"] = steps.queries, steps.hits
    return StageStats(
        device_memory=device_bytes(device),
        host_memory=resident_bytes(),
        offload_bytes=dict(model.weights.moved) if model else {},
        offload_late=model.weights.late if model else {},
        cache_queries=queries,
        cache_hits=hits,
    )

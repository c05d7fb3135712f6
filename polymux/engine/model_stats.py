"""The numbers of a stage that are its model's: what was moved, what caches have answered, what memory it takes."""

from __future__ import annotations

import torch

from polymux.diffusion.encoder_cache import EncoderCache
from polymux.diffusion.step_cache import StepCache
from polymux.engine.model import Model
from polymux.memory.measure import device_bytes, resident_bytes
from polymux.request import StageStats


def model_stats(model: Model | None, device: torch.device, encoded: EncoderCache, steps: StepCache) -> StageStats:
    """Of caches, those that are in use; without what is about requests."""
    queries, hits = (dict(model.cache_queries), dict(model.cache_hits)) if model else ({}, {})
    if encoded.limit:
        queries["prompt_cache"], hits["prompt_cache"] = encoded.queries, encoded.hits
    if steps.used:
        queries["first_block"], hits["first_block"] = steps.queries, steps.hits
    return StageStats(
        offload_bytes=dict(model.weights.moved) if model else {},
        offload_late=model.weights.late if model else {},
        cache_queries=queries,
        cache_hits=hits,
        device_memory=device_bytes(device),
        host_memory=resident_bytes(),
    )

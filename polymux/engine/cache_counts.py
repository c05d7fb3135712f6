"""What has been looked for in the caches that are in use, and what was there, by the cache's name."""

from __future__ import annotations

from polymux.diffusion.encoder_cache import EncoderCache
from polymux.diffusion.step_cache import StepCache
from polymux.engine.model import Model


def cache_counts(model: Model | None, encoded: EncoderCache, steps: StepCache) -> tuple[dict[str, int], dict[str, int]]:
    """Queries, and hits among them."""
    queries, hits = (dict(model.cache_queries), dict(model.cache_hits)) if model else ({}, {})
    if encoded.limit:
        queries["prompt_cache"], hits["prompt_cache"] = encoded.queries, encoded.hits
    if steps.used:
        queries[steps.name], hits[steps.name] = steps.queries, steps.hits
    if model is not None and model.graphs is not None:
        queries["cuda_graphs"], hits["cuda_graphs"] = model.graphs.runs, model.graphs.replays
    return queries, hits

"""A picture whose prompts were all known is the one that was made when they were not, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.testing.tiny import TINY

from .reference import Arrays, distance, request
from .test_families import arrays, drive

# CLIP and T5; a language model that returns a key-value cache unasked; all layers of one; an image encoder; connectors.
NAMES = ("flux-dev", "qwen-image", "sd3", "wan21-i2v", "ltx2")


@pytest.mark.parametrize("name", NAMES)
def test_hits_change_nothing(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    spec = TINY[name]
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)), device="cpu", max_num_seqs=1)
    engine = DiffusionEngine.load(config, dict(spec.load))

    def made() -> tuple[Arrays, int]:
        """The output, and how often encoders have run for it."""
        encoders, before = [c.name for c in engine.components if c.role == "encoder"], engine.stats.calls
        engine.add(request(spec.call, "a", 1))
        output = arrays(drive(engine)["a"])
        return output, sum(engine.stats.calls.get(name, 0) - before.get(name, 0) for name in encoders)

    (first, runs), (second, none) = made(), made()
    engine.close()
    assert distance(second, first) == 0.0
    assert runs > 0 and none == 0

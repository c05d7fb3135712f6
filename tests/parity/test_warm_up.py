"""Every tiny pipeline warms up as `polymux serve` has it warm up, so it can be served as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.testing.tiny import TINY, names

# They choose a size of a megapixel themselves; their arguments are those of siblings that are tried.
SLOW = {"qwen-image-edit-plus", "qwen-image-layered", "kandinsky5-t2i", "flux-kontext"}


@pytest.mark.parametrize("name", [n for n in (*names("diffusers"), *names("modular")) if n not in SLOW])
def test_warm_up(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)))
    engine = DiffusionEngine.load(config, components=dict(TINY[name].load))
    engine.warm_up()
    assert engine.stats.steps >= 1
    engine.close()

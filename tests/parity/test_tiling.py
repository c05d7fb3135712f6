"""Autoencoders that work piece by piece: the result is that of diffusers' own tiled or sliced autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.tiling import enable_pieces
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.memory_config import MemoryConfig
from polymux.request import Finished
from polymux.testing.tiny import TINY

from .reference import Arrays, distance, reference, request

SIZES: dict[str, dict[str, Any]] = {
    "wan21-t2v": {"height": 272, "width": 272, "num_frames": 1},
    "sd15": {"height": 128, "width": 64},
}


def made(engine: DiffusionEngine, call: dict[str, Any]) -> Arrays:
    engine.add(request(call, "a", 1))
    events = []
    while engine.busy:
        events += engine.step()
    end = events[-1]
    assert isinstance(end, Finished), end
    return [from_wire(medium) for medium in end.outputs[0]]  # type: ignore[misc]


@pytest.mark.parametrize("name", SIZES)
def test_tiles(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)), max_num_seqs=1)
    call = dict(TINY[name].call) | SIZES[name] | {"num_inference_steps": 1}
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32)
    whole = reference(pipeline, call, 1)
    pipeline.vae.enable_tiling()
    tiled = reference(pipeline, call, 1)
    assert distance(tiled, whole) > 0, "it is large enough for tiles"
    flags = EngineConfig.from_flat(model=config.model.model, max_num_seqs=1, vae_use_tiling=True, vae_use_slicing=True)
    engine = DiffusionEngine.load(flags)
    assert distance(made(engine, call), tiled) == 0.0
    assert engine.pipeline.vae.use_slicing
    engine.close()


def test_slices(tiny_checkpoint: Callable[..., Path]) -> None:
    """Two pictures whose decoding is merged, and then sliced."""
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("sd15")), vae_use_slicing=True)
    call = dict(TINY["sd15"].call) | {"num_inference_steps": 2}
    wanted = reference(load_pipeline(config.model, torch.device("cpu"), torch.float32), call, 1)
    engine = DiffusionEngine.load(config)
    engine.add(request(call, "other", 2))
    assert distance(made(engine, call), wanted) < 1e-4
    engine.close()


def test_a_model_whose_autoencoder_has_none(tiny_checkpoint: Callable[..., Path]) -> None:
    for knob, flag in (("vae_use_tiling", "--vae-use-tiling"), ("vae_use_slicing", "--vae-use-slicing")):
        config = EngineConfig.from_flat(model=str(tiny_checkpoint("longcat-audiodit")), **{knob: True})
        with pytest.raises(ConfigError, match=f"{flag}: not offered by LongCatAudioDiTVae") as caught:
            DiffusionEngine.load(config)
        assert caught.value.param == knob
    with pytest.raises(ConfigError, match="a model without autoencoder"):
        enable_pieces({"transformer": torch.nn.Identity()}, MemoryConfig(vae_use_slicing=True))

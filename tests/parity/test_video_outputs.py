"""Videos as bytes, in parts, from tensors on the device: bit for bit diffusers' arrays when they are rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import load_pipeline
from polymux.omni_output import ChunkCollector
from polymux.request import Failed, OutputChunk
from polymux.testing.tiny import TINY

from .reference import reference, request


@pytest.mark.parametrize("name", ["wan21-t2v", "wan21-t2v-modular", "ltx2", "cosmos2-v2w", "cogvideox"])
def test_video(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)), max_num_seqs=1, output_chunk_bytes=10_000)
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(TINY[name].load))
    call = dict(TINY[name].call) | {"num_inference_steps": 2}
    frames, *sound = reference(pipeline, call, 1)
    engine = DiffusionEngine(config, pipeline, torch.device("cpu"))
    engine.add(request(call, "a", 1, "pil"))
    chunks, count = ChunkCollector(), 0
    while engine.busy:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, OutputChunk):
                chunks.add(event)
                engine.taken("a")
                count += 1
    engine.close()
    video, *heard = chunks.media_of(0)
    assert count > 1
    assert np.array_equal(video, (frames[0] * 255).round().clip(0, 255).astype(np.uint8))
    assert len(heard) == len(sound)
    for got, wanted in zip(heard, sound, strict=True):
        assert np.array_equal(got, wanted.squeeze())

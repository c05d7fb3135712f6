"""Frames that leave while others are decoded are those of a decode in one go, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.frame_stream import FrameTap
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.families import all_families
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.omni_output import ChunkCollector
from polymux.request import Failed, Finished, OutputChunk
from polymux.testing.tiny import TINY

from .reference import reference, request

CPU = torch.device("cpu")
NAMES = ["wan21-t2v", "wan22-ti2v", "wan22-ti2v-i2v", "wan21-i2v", "wan21-vace", "skyreels-v2-t2v"]


class Frames:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.counts: set[int] = set()

    def put(self, frames: torch.Tensor, start: int, count: int) -> None:
        assert start == sum(map(len, self.parts))
        self.parts.append(frames.clone())
        self.counts.add(count)


def loaded(name: str, folder: Path) -> Any:
    config = EngineConfig.from_flat(model=str(folder)).model
    return load_pipeline(config, CPU, torch.float32, components=dict(TINY[name].load))


def test_every_family_that_declares_it_is_tested(tiny_checkpoint: Callable[..., Path]) -> None:
    declared = {p for f in all_families() if f.streamed_decode for p in f.pipelines if "Modular" not in p}
    tested = {type(loaded(name, tiny_checkpoint(name))).__name__ for name in NAMES}
    assert tested == declared


@pytest.mark.parametrize("name", NAMES)
def test_the_frames_are_the_same(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Without an engine: no batch and no bytes between the two."""
    pipeline = loaded(name, tiny_checkpoint(name))
    call = {k: v for k, v in TINY[name].call.items() if k not in ("output_type", "num_inference_steps")}
    call |= {"num_frames": 9, "num_inference_steps": 2, "output_type": "pt"}

    def made(own: Any) -> torch.Tensor:
        own.scheduler = copy.deepcopy(pipeline.scheduler)
        with torch.no_grad():
            frames: torch.Tensor = own(**call, generator=torch.Generator().manual_seed(1)).frames
        return frames[0]

    whole = made(copy.copy(pipeline))
    sink, own = Frames(), copy.copy(pipeline)
    FrameTap(4, 0, lambda: sink).attach(own)
    nothing = made(own)
    assert nothing.shape[-2:] == (0, 0), "what the pipeline itself holds"
    assert len(sink.parts) == 3 and sink.counts == {9}
    assert torch.equal(torch.cat(sink.parts), whole)


def engine_for(name: str, folder: Path, **knobs: Any) -> DiffusionEngine:
    knobs = {"max_num_seqs": 4, "output_chunk_bytes": 10_000} | knobs
    config = EngineConfig.from_flat(model=str(folder), **knobs)
    return DiffusionEngine(config, loaded(name, folder), CPU)


def test_two_at_once_do_not_mix(tiny_checkpoint: Callable[..., Path]) -> None:
    """Their decodes take turns, and each has a cache of its own."""
    name = "wan21-t2v"
    engine = engine_for(name, tiny_checkpoint(name))
    call = dict(TINY[name].call) | {"num_frames": 9, "num_inference_steps": 2}
    collected, order = {"a": ChunkCollector(), "b": ChunkCollector()}, []
    engine.add(request(call, "a", 1, "pil"))
    engine.add(request(call, "b", 2, "pil"))
    while engine.busy:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, OutputChunk):
                collected[event.request_id].add(event)
                decoding = event.request_id in engine.jobs and bool(engine.jobs[event.request_id].sessions)
                order.append(decoding)
                engine.taken(event.request_id)
    assert (order[0], order[-1]) == (True, False), "the first ones are out before the last ones are decoded"
    assert engine.stats.calls["vae"] > 2 * 3
    for seed, chunks in zip((1, 2), collected.values(), strict=True):
        frames, *_ = reference(engine.pipeline, call, seed)
        (video,) = chunks.media_of(0)
        wanted = (frames[0] * 255).round().clip(0, 255)
        assert np.abs(video.astype(int) - wanted).max() <= 1, "merged steps add in another order"
    engine.close()


def test_small_ones_are_decoded_in_one_go(tiny_checkpoint: Callable[..., Path]) -> None:
    name = "wan21-t2v"
    engine = engine_for(name, tiny_checkpoint(name), output_chunk_bytes=10**7)
    engine.add(request(dict(TINY[name].call) | {"num_inference_steps": 2}, "a", 1, "pil"))
    events = [event for _ in iter(lambda: engine.busy, False) for event in engine.step()]
    assert isinstance(events[-1], Finished) and np.asarray(from_wire(events[-1].outputs[0][0])).ndim == 4
    assert engine.stats.calls["vae"] == 1
    engine.close()


def test_aborted_in_the_middle_of_decoding(tiny_checkpoint: Callable[..., Path]) -> None:
    name = "wan21-t2v"
    engine = engine_for(name, tiny_checkpoint(name))
    call = dict(TINY[name].call) | {"num_frames": 17, "num_inference_steps": 2}
    engine.add(request(call, "a", 1, "pil"))
    while not engine.jobs["a"].streams_open:
        engine.step()
    engine.abort("a")
    events = engine.step()
    assert isinstance(events[-1], Failed) and not engine.busy
    engine.add(request(call, "a", 1, "pil"))
    while engine.busy:
        events = engine.step()
        for event in events:
            if isinstance(event, OutputChunk):
                engine.taken("a")
    assert isinstance(events[-1], Finished)
    engine.close()

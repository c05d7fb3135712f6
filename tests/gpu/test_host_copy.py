"""Outputs on their way from a CUDA device: the same bytes as on the plain path, whatever else the device does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.host_copy import HostCopy
from polymux.diffusion.outputs import RawOutput
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.omni_output import ChunkCollector
from polymux.request import ArrayData, Failed, OmniDiffusionSamplingParams, OutputChunk, Request

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_the_host(dtype: torch.dtype) -> None:
    """Written by a kernel that is still running when the copy is asked for, and overwritten right after."""
    values = torch.rand(33, 3, 120, 208, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = (values.float().numpy() * 255).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    source, busy = values.to(DEVICE), torch.rand(4096, 4096, device=DEVICE)
    parts: list[ArrayData] = []
    copy = HostCopy(DEVICE, 2 * 120 * 208 * 3)
    for _ in range(3):
        for _ in range(20):
            busy = (busy @ busy).clamp(0, 1)
        made = source.clone()
        after = copy.mark()
        parts.clear()
        raw = RawOutput([made], [], frames=True, channels_first=True)
        assert copy.run(raw, after, lambda medium, shape, start, rows: parts.append(rows)) == []
        assert np.array_equal(np.concatenate([np.asarray(from_wire(part)) for part in parts]), wanted)
        (whole,) = HostCopy(DEVICE, 2**30).run(raw, copy.mark(), lambda *_: None)
        assert np.array_equal(np.asarray(from_wire(whole)), wanted)


def test_requests_in_a_row_give_what_they_give_alone(tiny_checkpoint: Callable[..., Path]) -> None:
    knobs = {"output_chunk_bytes": 40_000, "max_num_seqs": 1, "enforce_eager": True}
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("wan21-t2v")), **knobs)
    engine = DiffusionEngine(config, load_pipeline(config.model, DEVICE, torch.float32), DEVICE)

    def made(*seeds: int) -> list[bytes]:
        collected = {str(seed): ChunkCollector() for seed in seeds}
        for seed in seeds:
            params = OmniDiffusionSamplingParams(height=64, width=64, num_frames=17, num_inference_steps=3, seed=seed)
            engine.add(Request(request_id=str(seed), prompt="a", params=params))
        while engine.busy:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, OutputChunk):
                    collected[event.request_id].add(event)
                    engine.taken(event.request_id)
        return [chunks.media_of(0)[0].tobytes() for chunks in collected.values()]

    alone = [made(seed)[0] for seed in range(4)]
    assert made(*range(4)) == alone
    assert len(set(alone)) == 4
    engine.close()

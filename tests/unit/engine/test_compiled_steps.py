"""Steps whose layers are compiled: one compilation for all layers of a class, two for all numbers of rows, none for
prompts, and what comes out stays the same. The compiler is one that makes no code: what is traced is what counts here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from polymux.ar import layers
from polymux.config import EngineConfig
from polymux.engine import ar_state
from polymux.engine.answering import load_answering, load_speaking
from polymux.engine.frame_engine import FrameEngine
from polymux.prompts import request_of
from polymux.request import Failed, SamplingParams, SoundPiece, TextPiece

SIZES = (5, 3, 2, 1)  # requests at once, which are filled up to 5, 4, 2 and 1


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As on a GPU, for engines that are loaded from then on."""

    def choose() -> None:
        monkeypatch.setattr(layers, "BACKEND", "eager")
        monkeypatch.setattr(ar_state, "graphs_of", lambda *_: "compiled")

    return choose


def made(engine: Any, sampling: SamplingParams) -> list[dict[str, list[Any]]]:
    """What requests get, so many at once."""
    results = []
    for count in SIZES:
        pieces: dict[str, list[Any]] = {str(i): [] for i in range(count)}
        for i in range(count):
            engine.add(request_of("hello there " * (i + 1), sampling, str(i)))
        while engine.busy:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, SoundPiece):
                    pieces[event.request_id].append(np.frombuffer(event.samples.data, np.float32))
                    engine.taken(event.request_id)
                elif isinstance(event, TextPiece):
                    pieces[event.request_id].append(event.text)
        results.append(pieces)
    return results


def test_answers(tiny_checkpoint: Callable[..., Path], compiled: Callable[[], None]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm")), max_num_seqs=5)
    sampling = SamplingParams(max_new_tokens=6, temperature=0)
    plain = load_answering(config)
    wanted = made(plain, sampling)
    plain.close()
    compiled()
    engine = load_answering(config)
    assert made(engine, sampling) == wanted
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2, "a single row, and all other numbers of them"
    assert not counters["graph_break"]
    engine.close()


@pytest.mark.parametrize(("name", "written"), [("qwen3-tts", 9), ("csm", 8)])
def test_frames(tiny_checkpoint: Callable[..., Path], compiled: Callable[[], None], name: str, written: int) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)), max_num_seqs=5)
    sampling = SamplingParams(max_new_tokens=written, seed=2, temperature=0.9)
    plain = load_speaking(config)
    wanted = made(plain, sampling)
    plain.close()
    compiled()
    engine = load_speaking(config)
    assert isinstance(engine, FrameEngine)
    for heard, said in zip(made(engine, sampling), wanted, strict=True):
        for request, parts in said.items():
            assert np.abs(np.concatenate(heard[request]) - np.concatenate(parts)).max() <= 1e-4
    for decoder in engine._writer.decoders:
        for layer in decoder.get_submodule("layers").children():
            assert isinstance(layer.forward, partial), "it may be compiled"
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 8, "of two kinds of layers and two ways to draw, for a single row and for all other numbers"
    assert not counters["graph_break"]
    engine.close()

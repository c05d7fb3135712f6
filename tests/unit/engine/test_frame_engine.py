"""Sentences that are written together: as alone and as in loops of their own, with little room, and when some leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.answering import load_speaking
from polymux.engine.frame_engine import FrameEngine
from polymux.engine.generate_engine import GenerateEngine
from polymux.errors import ConfigError
from polymux.prompts import request_of
from polymux.request import Failed, Finished, SamplingParams
from tests.parity.sounding import pieces_of

LINES = ["hello there", "a cat and a dog and a fox", "one two three four", "my friend", "what i said"]
DRAWN = {"max_new_tokens": 14, "temperature": 1.1}
FRAME = 1 << 14  # bytes of the cache that are enough for some frames


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3-tts")


def loaded(folder: Path, **flat: Any) -> GenerateEngine:
    engine = load_speaking(EngineConfig.from_flat(model=str(folder), **flat))
    assert isinstance(engine, GenerateEngine)
    return engine


def add(engine: GenerateEngine, index: int, **params: Any) -> None:
    engine.add(request_of(LINES[index], SamplingParams(**DRAWN | {"seed": index} | params), str(index)))


def step(engine: GenerateEngine, count: int = 1) -> None:
    """What comes of it is told later."""
    for _ in range(count):
        events = engine.step()
        engine.events[:0] = events


def said(engine: GenerateEngine) -> dict[str, np.ndarray[Any, Any]]:
    pieces, ends = pieces_of(engine)
    assert all(isinstance(end, Finished) for end in ends.values()), ends
    return {name: np.concatenate(parts, axis=1) for name, parts in pieces.items()}


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Each in a loop of its own."""
    engine = loaded(folder, decoding="generate")
    assert not isinstance(engine, FrameEngine)
    made = {}
    for i in range(len(LINES)):
        add(engine, i)
        made |= said(engine)
    engine.close()
    return made


@pytest.mark.parametrize("more", [{}, {"max_num_seqs": 2}, {"kv_cache_memory_bytes": 2 * FRAME}], ids=str)
def test_what_is_drawn_is_what_loops_draw(folder: Path, wanted: dict[str, np.ndarray[Any, Any]], more: Any) -> None:
    """Also when there are rows or blocks for few at once, and the others wait."""
    engine = loaded(folder, **more)
    most = 0
    for i in range(len(LINES)):
        add(engine, i)
    take = engine.step

    def counted() -> Any:
        nonlocal most
        events = take()
        most = max(most, sum(sentence.row is not None for sentence in engine._begun))  # type: ignore[attr-defined]
        return events

    engine.step = counted  # type: ignore[method-assign]
    made = said(engine)
    assert made.keys() == wanted.keys()
    for name, sound in made.items():
        assert sound.shape == wanted[name].shape and np.abs(sound - wanted[name]).max() <= 1e-4, name
    assert most == (2 if more else len(LINES))
    assert not engine.stats.kv_blocks_used
    engine.close()


def test_those_who_leave_change_nothing(folder: Path, wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    """Aborted while they wait, while they are written, and while they are heard."""
    engine = loaded(folder, max_num_seqs=4)
    for i in range(len(LINES)):
        add(engine, i)
    step(engine)
    engine.abort("4")
    for count, name in ((3, "1"), (6, "2")):
        step(engine, count)
        engine.abort(name)
    pieces, ends = pieces_of(engine)
    assert {name for name, end in ends.items() if isinstance(end, Failed)} == {"1", "2", "4"}
    for name in ("0", "3"):
        assert np.abs(np.concatenate(pieces[name], axis=1) - wanted[name]).max() <= 1e-4
    assert not engine.stats.kv_blocks_used and not engine.busy
    engine.close()


def test_a_step_that_fails_is_the_end_of_those_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(folder)
    assert isinstance(engine, FrameEngine)
    add(engine, 0)
    step(engine, 3)
    batch = type(engine.batch)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "step", lambda self, rows: torch.zeros(2) @ torch.zeros(3))
        step(engine)
    add(engine, 1)
    _, ends = pieces_of(engine)
    assert isinstance(ends["0"], Failed) and "the model failed" in ends["0"].error.message
    assert isinstance(ends["1"], Finished)
    assert not engine.stats.kv_blocks_used
    engine.close()


def test_a_prompt_that_cannot_be_read_leaves_no_row_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a row nor blocks, so that the next request has room."""
    engine = loaded(folder, max_num_seqs=1)
    assert isinstance(engine, FrameEngine)
    add(engine, 0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._writer, "first", lambda state, rows: torch.zeros(2) @ torch.zeros(3))
        _, ends = pieces_of(engine)
    assert isinstance(ends["0"], Failed) and "the model failed" in ends["0"].error.message
    assert not engine.stats.kv_blocks_used
    add(engine, 1)
    _, ends = pieces_of(engine)
    assert isinstance(ends["1"], Finished)
    engine.close()


def test_what_can_never_fit_is_refused(folder: Path) -> None:
    engine = loaded(folder, kv_cache_memory_bytes=2 * FRAME)
    add(engine, 0, max_new_tokens=500)
    _, ends = pieces_of(engine)
    assert isinstance(ends["0"], Failed) and ends["0"].error.param == "max_new_tokens"
    assert "do not fit in the cache (--kv-cache-memory-bytes)" in ends["0"].error.message
    engine.close()
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: the cache has 8 bytes"):
        loaded(folder, kv_cache_memory_bytes=8)


@pytest.mark.parametrize(
    ("flat", "field"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens"),
        ({"decoding": "generate", "block_size": 32}, "block_size"),
        ({"decode_graphs": "plain"}, "decode_graphs"),
        ({"merge_decoding": True}, "merge_decoding"),
    ],
)
def test_settings_that_cannot_act_are_refused(folder: Path, flat: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(folder, **flat)
    assert error.value.param == field

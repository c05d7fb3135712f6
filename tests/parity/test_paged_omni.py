"""Models that see, hear and speak, where answers go on together: greedy text and its voice are those of transformers,
of the whole model and in stages, alone and beside others with and without media, with prompts in parts, after
beginnings that are found and after a preemption; and so are the states that the voice is made of.

fp32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.decoding_config import DecodingConfig
from polymux.engine import ar_state
from polymux.engine.answering import load_answering, load_thinking, unpaged
from polymux.engine.ar_engine import ArEngine
from polymux.engine.ar_speak_engine import ArSpeakEngine
from polymux.engine.ar_think_engine import ArThinkEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.decode_engine import DecodeEngine
from polymux.engine.generate_model import GenerateModel
from polymux.engine.talk_engine import TalkEngine
from polymux.engine.think_engine import ThinkEngine
from polymux.parcel import Chunk
from polymux.request import Event, Failed, Finished
from polymux.testing.tiny.inputs import have_torchvision

from .test_chat import CASES, GREEDY, HEARS, SEES, SEES_ELSE, VOICE, WATCHES, Answer, Ask, check, request_for, said
from .test_omni_stages import drive, says

STARVED = 8  # steps
SAYS = {"extra_args": VOICE}
ASKS = (
    Ask("sees", [said("user", SEES, "what is it?")], True, GREEDY | SAYS),
    Ask("hears", [said("user", HEARS, "what is it?")], True, GREEDY | SAYS),
    Ask("watches", [said("system", "be brief"), said("user", WATCHES, "what?")], params=GREEDY),
    Ask("all", [said("user", SEES, WATCHES, "and"), said("assistant", "a cat"), said("user", HEARS, SEES_ELSE, "now?")],
        params=GREEDY | {"max_new_tokens": 9}),
    Ask("reads", [said("user", "say hello")], True, GREEDY | {"max_new_tokens": 11} | SAYS),
    Ask("penalised", [said("user", SEES, "x")], params=GREEDY | {"max_new_tokens": 12, "repetition_penalty": 1.3}),
    Ask("turns", [said("user", SEES, "what is it?"), said("assistant", "it is"), said("user", SEES_ELSE, "and that?")],
        params=GREEDY),
    Ask("again", [said("user", SEES_ELSE, "what is it?")], params=GREEDY),
)  # fmt: skip
HOWS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "in parts": {"max_num_batched_tokens": 9},
    "whole": {"max_num_batched_tokens": 19, "enable_chunked_prefill": False, "block_size": 8},
    "preempted": {"block_size": 8},
}


@pytest.fixture(scope="module", params=["qwen25-omni", "qwen3-omni-moe"])
def name(request: pytest.FixtureRequest) -> str:
    if not have_torchvision():
        pytest.skip("its processor needs torchvision")
    return str(request.param)


@pytest.fixture(scope="module")
def flags(name: str, tiny_checkpoint: Callable[..., Path]) -> dict[str, Any]:
    return {"model": str(tiny_checkpoint(name)), "device": "cpu", "dtype": "fp32", "num_threads": 1, "max_num_seqs": 9}


@pytest.fixture(scope="module")
def wanted(name: str, flags: dict[str, Any]) -> dict[str, Answer]:
    with torch.no_grad():
        answer = CASES[name][0](Path(flags["model"]))
        return {ask.name: answer(ask) for ask in ASKS}


@pytest.fixture(scope="module")
def tokenizer(flags: dict[str, Any]) -> Any:
    return T.AutoTokenizer.from_pretrained(flags["model"])


@pytest.fixture(scope="module")
def model(flags: dict[str, Any]) -> Iterator[GenerateModel]:
    loaded = GenerateModel.load(EngineConfig.from_flat(**flags), torch.device("cpu"))
    yield loaded
    loaded.close()


def whole(flags: dict[str, Any], model: GenerateModel, ahead: bool = False, **more: Any) -> ArSpeakEngine:
    """Of a model that is loaded already, and captured again."""
    for component in model.components:
        component.attach()
    return ArSpeakEngine(EngineConfig.from_flat(**flags | more), model, torch.device("cpu"), ahead)


@pytest.mark.parametrize("how", HOWS)
def test_answers_are_those_of_transformers(
    how: str,
    flags: dict[str, Any],
    model: GenerateModel,
    wanted: dict[str, Answer],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "in parts":  # and as on a GPU
        monkeypatch.setattr(ar_state, "graphs_of", lambda *_: "padded")
    engine = whole(flags, model, ahead=how == "in parts", **HOWS[how])
    check(drive((engine,), [request_for(ASKS[0], "alone")])["alone"], wanted[ASKS[0].name], tokenizer, 1e-4)
    for asks in (ASKS, ASKS[::-1]):
        if how == "preempted":
            starve(engine)
        got = drive((engine,), [request_for(ask, ask.name) for ask in asks])
        for ask in asks:
            check(got[ask.name], wanted[ask.name], tokenizer, 1e-4)
    stats = engine.stats
    assert bool(stats.cache_hits) == (how != "plain") and (stats.preemptions > 1) == (how == "preempted")
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def starve(engine: ArEngine) -> None:
    """All begin together, and when they have, there are no free blocks for a while."""
    assert engine._state is not None
    state, held, steps = engine._state, list[int](), -1

    def starved() -> list[Event]:
        nonlocal steps
        if steps < 0 and any(job.sequence is None for job in engine._jobs.values()):
            with torch.no_grad():
                engine._admit(state)
            return []
        steps += 1
        if 0 < steps < STARVED:
            held.extend(state.pool.take() for _ in range(state.pool.free))
        if steps == STARVED:
            state.pool.give_back(held)
        return type(engine).step(engine)

    engine.step = starved  # type: ignore[method-assign]


def think(flags: dict[str, Any], model: GenerateModel, **more: Any) -> ArThinkEngine:
    for component in model.components:
        component.attach()
    config = EngineConfig.from_flat(**flags | more, split_stages=True)
    return ArThinkEngine(config, model, torch.device("cpu"), ahead=True)


def test_states_are_those_of_transformers(flags: dict[str, Any], model: GenerateModel) -> None:
    """What the talker is told: by a thinker whose answers go on together, after preemptions too, and by
    transformers'."""
    asks = [replace(ask, speaks=True) for ask in ASKS if ask.name != "all"]  # that one not every talker can speak about
    kept: list[dict[str, dict[str, Any]]] = []
    theirs = ThinkEngine.load(EngineConfig.from_flat(**flags, split_stages=True))
    ours = think(flags, model, block_size=8)
    starve(ours)
    for engine in (theirs, ours):
        found: dict[str, dict[str, Any]] = {}
        for ask in asks:
            engine.add(request_for(ask, ask.name))
        while engine.busy:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Chunk):
                    found[event.request_id] = dict(engine._connector.get(event.parcel))
        kept.append(found)
    theirs.close()
    assert ours.stats.preemptions > 1 and set(kept[0]) == set(kept[1]) == {ask.name for ask in asks}
    for asked, told in kept[0].items():
        mine = kept[1][asked]
        assert set(mine) == set(told)
        for what, array in told.items():
            assert mine[what].shape == array.shape and mine[what].dtype == array.dtype, what
            assert np.allclose(mine[what], array, rtol=0, atol=1e-4 if array.dtype == np.float32 else 0), (asked, what)


def test_what_is_spoken_is_the_same_in_stages(
    flags: dict[str, Any], model: GenerateModel, wanted: dict[str, Answer], tokenizer: Any
) -> None:
    config = EngineConfig.from_flat(**flags, split_stages=True)
    first = think(flags, model)
    stages = (first, TalkEngine.load(replace(config, stage=1)), DecodeEngine.load(replace(config, stage=2)))
    try:
        first.warm_up()
        got = drive(stages, [request_for(ask, ask.name) for ask in ASKS])
        for ask in ASKS:
            check(got[ask.name], wanted[ask.name], tokenizer, 1e-4)
        spoken = sum(ask.speaks for ask in ASKS)
        assert sum(mine.end.metrics.audio_tokens > 0 for mine in got.values()) == spoken  # type: ignore[union-attr]
        short = says("short", 1)
        for engine in (first, stages[1]):
            assert not engine._connector._held
        first.add(short)
        while not first._connector._held:
            first.step()
        first.abort("short")  # it has ended here, and the talker has not used it up
        assert not first._connector._held and first.stats.kv_blocks_used == 0
    finally:
        for engine in stages[1:]:
            engine.close()


def test_what_is_drawn_is_the_same_after_a_sleep(flags: dict[str, Any]) -> None:
    """And a request that is aborted while it is spoken leaves nothing."""
    engine = load_answering(EngineConfig.from_flat(**flags))
    assert isinstance(engine, ArSpeakEngine) and engine.capabilities.merges
    asks = [says("a", 1, talker_max_new_tokens=12), says("b", 2, talker_max_new_tokens=6)]
    first = drive((engine,), asks)
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        engine.add(asks[0])
        while not engine._speech.jobs:
            engine.step()
        assert not engine._jobs and engine.stats.running + engine.stats.waiting == 1
        engine.abort("a")
        assert [type(event) for event in engine.step()] == [Failed] and not engine.busy
        for name, got in drive((engine,), asks[::-1]).items():
            assert isinstance(got.end, Finished) and got.end.metrics.audio_tokens > 0
            assert got.text == first[name].text and got.end.seeds == first[name].end.seeds  # type: ignore[union-attr]
            assert np.allclose(np.concatenate(got.wave, 1), np.concatenate(first[name].wave, 1), rtol=0, atol=1e-4)
    engine.close()


def test_which_engine_answers(
    flags: dict[str, Any],
    model: GenerateModel,
    wanted: dict[str, Answer],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig.from_flat(**flags)
    assert unpaged(config, model) is None
    assert "--merge-decoding" in str(unpaged(EngineConfig.from_flat(**flags, merge_decoding=True), model))
    thinker, parts = model.parts.model.thinker, model.parts
    with monkeypatch.context() as patch:
        patch.setattr(thinker.generation_config, "no_repeat_ngram_size", 3)
        assert "no_repeat_ngram_size" in str(unpaged(config, model))
    with monkeypatch.context() as patch:
        patch.setattr(model.family.adapter, "sees_at", 3.7)
        assert "tokens apart" in str(unpaged(config, model))
    monkeypatch.setattr(GenerateModel, "load", lambda *_: model)
    split = EngineConfig.from_flat(**flags, split_stages=True)
    generate = DecodingConfig(decoding="generate")
    assert type(load_thinking(split)) is ArThinkEngine
    assert type(load_thinking(replace(split, decoding=generate))) is ThinkEngine
    assert type(load_answering(replace(config, decoding=generate))) is ChatEngine
    monkeypatch.setattr(parts.model, "has_talker", False)
    for component in model.components:
        component.attach()
    mute = load_answering(config)  # of a checkpoint that does not speak
    assert type(mute) is ArEngine and mute.capabilities.makes == ("text",)
    silent = [ask for ask in ASKS if not ask.speaks]
    got = drive((mute,), [request_for(ask, ask.name) for ask in silent])
    for ask in silent:
        check(got[ask.name], wanted[ask.name], tokenizer)


@pytest.mark.parametrize("steps", [3, 12, 60])
def test_who_leaves_or_fails_is_alone_in_that(
    steps: int,
    flags: dict[str, Any],
    model: GenerateModel,
    wanted: dict[str, Answer],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Aborted while its media wait to be read, in its prompt, and while it is written; and one whose media cannot be
    read."""
    engine = whole(flags, model, ahead=True, max_num_batched_tokens=9)
    adapter, read = model.family.adapter, model.family.adapter.read  # type: ignore[attr-defined]
    broken = Ask(
        "broken",
        [said("user", SEES, HEARS, "what is that, which cannot be seen?")],
        params=GREEDY | {"max_new_tokens": 7},
    )

    def fails(parts: Any, call: Any) -> Any:
        if len(call.contents) == 2 and call.steps == 7:
            raise RuntimeError("it cannot be seen")
        return read(parts, call)

    monkeypatch.setattr(adapter, "read", fails)
    left = steps

    def step() -> list[Event]:
        nonlocal left
        if not left:
            for name in ("gone", "left"):
                engine.abort(name)
        left -= 1
        return type(engine).step(engine)

    engine.step = step  # type: ignore[method-assign]
    asked = {ask.name: ask for ask in ASKS}
    others = [asked[name] for name in ("sees", "all", "reads")]
    long = replace(asked["turns"], params={"max_new_tokens": 300, "do_sample": False})
    gone = [request_for(long, "left"), request_for(replace(long, speaks=True), "gone")]
    got = drive((engine,), [*gone, request_for(broken, "broken"), *(request_for(ask, ask.name) for ask in others)])
    for ask in others:
        check(got[ask.name], wanted[ask.name], tokenizer, 1e-4)
    ends = {name: got[name].end for name in ("gone", "left", "broken")}
    kinds = ["RequestAbortedError", "RequestAbortedError", "GenerationError"]
    assert [end.error.kind for end in ends.values() if isinstance(end, Failed)] == kinds
    assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_blocks_used) == (0, 0, 0)


def test_nothing_to_speak_is_an_error_that_says_so(
    flags: dict[str, Any], model: GenerateModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = model.family.adapter
    speech, ask = adapter.speech, adapter.ask  # type: ignore[attr-defined]
    for engine in (whole(flags, model), think(flags, model)):
        with monkeypatch.context() as patch:  # every token ends the answer
            patch.setattr(adapter, "ask", lambda *args: replace(ask(*args), steps=1))
            end = drive((engine,), [says("a", 1)])["a"].end
            assert isinstance(end, Failed) and "no words that could be spoken" in end.error.message
        assert not engine.busy and engine.stats.kv_blocks_used == 0
    engine = whole(flags, model)
    with monkeypatch.context() as patch:  # every code ends the speech
        patch.setattr(adapter, "speech", lambda *args: speech(*args) | {"talker_eos_token_id": list(range(72))})
        end = drive((engine,), [says("a", 1)])["a"].end
        assert isinstance(end, Failed) and "come to its end before it said anything" in end.error.message
    assert not engine.busy

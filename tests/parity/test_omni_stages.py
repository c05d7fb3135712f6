"""A model that thinks, talks and decodes in three stages answers as it does in one, which is as transformers does."""

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
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.decode_engine import DecodeEngine
from polymux.engine.talk_engine import TalkEngine
from polymux.engine.think_engine import ThinkEngine
from polymux.engine.windowed import Blocked
from polymux.families.generate import BlockShape
from polymux.omni_output import samples_of
from polymux.orchestrator.router import together
from polymux.parcel import Chunk, Consumed
from polymux.request import Failed, Finished, Request, SamplingParams, SoundPiece, TextPiece
from polymux.testing.tiny.inputs import have_torchvision

from .test_chat import CASES, OMNI, Got, check, request_for

Stages = tuple[ThinkEngine, TalkEngine, DecodeEngine]
LONG = {"talker_max_new_tokens": 16}


@pytest.fixture(scope="module", params=["qwen25-omni", "qwen3-omni-moe"])
def name(request: pytest.FixtureRequest) -> str:
    if not have_torchvision():
        pytest.skip("its processor needs torchvision")
    return str(request.param)


@pytest.fixture(scope="module")
def flags(name: str, tiny_checkpoint: Callable[..., Path]) -> dict[str, Any]:
    return {"model": str(tiny_checkpoint(name)), "device": "cpu", "dtype": "fp32", "num_threads": 1, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def stages(flags: dict[str, Any]) -> Iterator[Stages]:
    config = EngineConfig.from_flat(**flags, split_stages=True)
    made = (
        ThinkEngine.load(config),
        TalkEngine.load(replace(config, stage=1)),
        DecodeEngine.load(replace(config, stage=2)),
    )
    for engine in made:
        engine.warm_up()
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def whole(flags: dict[str, Any]) -> Iterator[ChatEngine]:
    engine = ChatEngine.load(EngineConfig.from_flat(**flags))
    yield engine
    engine.close()


def drive(engines: tuple[StageEngine, ...], requests: list[Request]) -> dict[str, Got]:
    """What the orchestrator does, in one process."""
    got = {request.request_id: Got() for request in requests}
    asked = {request.request_id: request for request in requests}
    at: dict[str, set[int]] = {request.request_id: {0} for request in requests}
    ends: dict[str, dict[int, Finished]] = {request.request_id: {} for request in requests}
    for request in requests:
        engines[0].add(request)
    while any(engine.busy for engine in engines):
        for stage, engine in enumerate(engines):
            for event in engine.step() if engine.busy else ():
                mine = got[event.request_id]
                match event:
                    case TextPiece(_, text):
                        mine.text += text
                        mine.order.append("text")
                    case SoundPiece():
                        mine.wave.append(samples_of(event))
                        mine.order.append("sound")
                        engine.taken(event.request_id)
                    case Chunk(name):
                        if stage + 1 not in at[name]:
                            engines[stage + 1].add(asked[name])
                            at[name].add(stage + 1)
                        engines[stage + 1].feed(event)
                    case Consumed(name, _):
                        engines[stage - 1].taken(name)
                    case Finished(name):
                        ends[name][stage] = event
                    case Failed():
                        mine.end = event
    for request_id, mine in got.items():
        if mine.end is None:
            assert set(ends[request_id]) == at[request_id]
            mine.end = together(ends[request_id], 0.0)
    return got


def says(name: str, seed: int, **extra: Any) -> Request:
    params = SamplingParams(seed=seed, max_new_tokens=9, extra_args=extra)
    return Request(request_id=name, prompt=f"hello {seed}", modalities=("text", "audio"), sampling=params)


@torch.no_grad()
def test_answers_are_those_of_transformers(name: str, flags: dict[str, Any], stages: Stages) -> None:
    """Text, pictures, sounds and films, alone and with neighbours; only what is spoken reaches the talker."""
    load, _, _ = CASES[name]
    answer, tokenizer = load(Path(flags["model"])), T.AutoTokenizer.from_pretrained(flags["model"])
    wanted = {ask.name: answer(ask) for ask in OMNI}
    check(drive(stages, [request_for(OMNI[0], "alone")])["alone"], wanted[OMNI[0].name], tokenizer, 1e-4)
    steps = stages[1].stats.steps
    got = drive(stages, [request_for(ask, ask.name) for ask in OMNI])
    for ask in OMNI:
        check(got[ask.name], wanted[ask.name], tokenizer, 1e-4)
    assert stages[1].stats.steps - steps == sum(mine.end.metrics.audio_tokens for mine in got.values())  # type: ignore[union-attr]
    drive(stages, [request_for(ask, ask.name) for ask in OMNI if not ask.speaks])
    assert stages[1].stats.steps - steps == sum(mine.end.metrics.audio_tokens for mine in got.values())  # type: ignore[union-attr]


def test_what_is_drawn_is_the_same(stages: Stages, whole: ChatEngine) -> None:
    """The talker, and the decoder that begins with noise, draw on where the stage before has stopped; in chunks, and
    after a sleep."""
    asks = [says("a", 1, **LONG), says("b", 2, talker_max_new_tokens=6)]
    wanted = drive((whole,), asks)
    for engine, level in zip(stages, (1, 2, 1), strict=True):
        engine.sleep(level)
        engine.wake_up()
    stages[1]._rows = 5
    got = drive(stages, asks)
    for name, mine in got.items():
        his = wanted[name]
        assert isinstance(mine.end, Finished) and isinstance(his.end, Finished), (mine.end, his.end)
        assert mine.text == his.text and mine.end.finish_reason == his.end.finish_reason
        assert mine.end.metrics.audio_tokens == his.end.metrics.audio_tokens
        ours, theirs = np.concatenate(mine.wave, axis=1), np.concatenate(his.wave, axis=1)
        assert ours.shape == theirs.shape and np.abs(ours - theirs).max() <= 1e-4
        assert mine.end.sound_seconds == pytest.approx(his.end.sound_seconds)
    frames = isinstance(stages[1].family.adapter.frame_shape(stages[1].loaded.parts), BlockShape)
    assert (len(got["a"].wave) > 1) == frames  # heard before it is at its end, if the decoder can do that
    assert not stages[0]._connector._held and not stages[1]._connector._held


def test_each_stage_has_its_own_weights_only(stages: Stages, whole: ChatEngine) -> None:
    parts = [stages[0].loaded.parts, stages[1].loaded.parts, stages[2]._parts]
    own: list[set[str]] = [{n for n, p in one.model.named_parameters() if not p.is_meta} for one in parts]
    assert [len({name.partition(".")[0] for name in names}) for names in own] == [1, 1, 1]
    everything = {n for n, _ in whole.loaded.parts.model.named_parameters()}
    assert own[0] | own[1] | own[2] == everything and sum(map(len, own)) == len(everything)


def test_an_abort_leaves_nothing(stages: Stages) -> None:
    think, talk, _ = stages
    talk._rows = 7
    request = says("a", 1, **LONG)
    think.add(request)
    chunks: list[Chunk] = []
    while not chunks:
        chunks = [event for event in think.step() if isinstance(event, Chunk)]
    assert think._connector._held
    talk.add(request)
    talk.feed(chunks[0])
    for _ in range(5):
        talk.step()
    assert talk.jobs["a"].sessions
    for engine in stages:
        engine.abort("a")
    while think.busy or talk.busy:
        think.step()
        talk.step()
    assert not think.jobs and not talk.jobs and not think._connector._held and not talk._connector._held
    talk.feed(chunks[0])  # too late: nobody asks
    assert not talk.jobs and not talk.events


def test_nothing_to_speak_is_an_error_that_says_so(
    stages: Stages, whole: ChatEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = whole.family.adapter
    speech, ask = adapter.speech, adapter.ask  # type: ignore[attr-defined]
    for engines in ((whole,), stages):
        with monkeypatch.context() as patch:  # every code ends the speech
            patch.setattr(adapter, "speech", lambda *args: speech(*args) | {"talker_eos_token_id": list(range(72))})
            end = drive(engines, [says("a", 1)])["a"].end
            assert isinstance(end, Failed) and "come to its end before it said anything" in end.error.message
        with monkeypatch.context() as patch:  # every token ends the answer

            def short(*args: Any) -> Any:
                call = ask(*args)
                return replace(call, arguments=call.arguments | {"thinker_max_new_tokens": 1})

            patch.setattr(adapter, "ask", short)
            end = drive(engines, [says("a", 1)])["a"].end
            assert isinstance(end, Failed) and "no words that could be spoken" in end.error.message
    assert not stages[0]._connector._held


@pytest.mark.parametrize("size", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("frames", [0, 1, 6, 12, 31])
def test_blocks_are_decoded_as_in_one_go(size: int, frames: int) -> None:
    """A decoder whose samples depend on all before them, and which keeps the last two until the next frame is there."""
    x, block, context = np.random.default_rng(0).normal(size=(1, frames)), 6, 2

    def decode(arrays: Any) -> Any:
        return np.repeat(np.cumsum(arrays["x"], axis=1), 3, axis=1)[:, : arrays["x"].shape[1] * 3 - 2]

    window = Blocked(BlockShape(hop=3, block=block, context=context), decode)
    chunks = [x[:, i : i + size] for i in range(0, max(frames, 1), size)]
    made = [window.push({"x": chunk}, i == len(chunks) - 1) for i, chunk in enumerate(chunks)]
    sounds = [sound for sound in made if sound is not None]
    whole = []
    for start in range(0, frames, block):
        before = context if start > context else start
        whole.append(decode({"x": x[:, start - before : start + block]})[:, before * 3 :])
    assert bool(sounds) == bool(frames)
    if frames:
        assert np.allclose(np.concatenate(sounds, axis=1), np.concatenate(whole, axis=1))

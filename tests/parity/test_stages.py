"""A model in two stages says what it says in one, sample for sample, however its work is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.config import EngineConfig
from polymux.engine.base import StageEngine
from polymux.engine.decode_engine import DecodeEngine
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.windowed import Windowed
from polymux.engine.write_engine import WriteEngine
from polymux.families.dia import frames_of
from polymux.families.generate import FrameShape
from polymux.omni_output import samples_of
from polymux.parcel import Chunk, Consumed
from polymux.request import Event, Failed, Finished, Request, SamplingParams, SoundPiece

Sound = np.ndarray[Any, Any]
SENTENCES = ("hello there my friend.", "one two three.", "good day.", "and now for something else.")
MODELS: dict[str, dict[str, Any]] = {
    "dia": {"seed": 2, "guidance_scale": 3.0, "top_k": 16, "max_new_tokens": 90},
    "speecht5-tts": {"seed": 5, "extra_args": {"threshold": 2.0, "maxlenratio": 1.5}},
}


def ask(model: str, name: str, count: int, **how: Any) -> Request:
    text = " ".join(SENTENCES[i % len(SENTENCES)] for i in range(count))
    return Request(request_id=name, prompt=text, sampling=SamplingParams(**MODELS[model] | how))


def all_of(model: str) -> list[Request]:
    return [ask(model, str(count), count) for count in (1, 2, 10)] + [ask(model, "quick", 2, speed=1.5)]


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def flags(model: str, tiny_checkpoint: Callable[..., Path]) -> dict[str, Any]:
    return {"model": str(tiny_checkpoint(model)), "device": "cpu", "dtype": "fp32", "num_threads": 1}


@pytest.fixture(scope="module")
def stages(flags: dict[str, Any]) -> Iterator[tuple[WriteEngine, DecodeEngine]]:
    config = EngineConfig.from_flat(**flags, split_stages=True)
    both = WriteEngine.load(config), DecodeEngine.load(replace(config, stage=1))
    for engine in both:
        engine.warm_up()
    yield both
    for engine in both:
        engine.close()


@pytest.fixture(scope="module")
def whole(model: str, flags: dict[str, Any]) -> dict[str, list[Sound]]:
    engine = GenerateEngine.load(EngineConfig.from_flat(**flags))
    made, _ = drive((engine,), all_of(model))
    engine.close()
    return made


def drive(engines: tuple[StageEngine, ...], requests: list[Request]) -> tuple[dict[str, list[Sound]], list[Event]]:
    """What the orchestrator does, in one process: pieces by request, and all other events of the last engine."""
    first, last = engines[0], engines[-1]
    pieces: dict[str, list[Sound]] = {request.request_id: [] for request in requests}
    others: list[Event] = []
    for request in requests:
        for engine in engines:
            engine.add(request)
    while any(engine.busy for engine in engines):
        for engine in engines:
            for event in engine.step() if engine.busy else ():
                match event:
                    case Chunk():
                        last.feed(event)
                    case Consumed(name, _):
                        first.taken(name)
                    case SoundPiece():
                        pieces[event.request_id].append(samples_of(event))
                        engine.taken(event.request_id)
                    case Finished() | Failed() if engine is last:
                        others.append(event)
                        if isinstance(event, Failed):
                            first.abort(event.request_id)
                    case Failed(_, error):
                        assert error.kind == "RequestAbortedError"
    return pieces, others


@pytest.mark.parametrize("rows", [1, 7, None])
def test_the_sound_is_the_same(
    model: str, stages: tuple[WriteEngine, DecodeEngine], whole: dict[str, list[Sound]], rows: int | None
) -> None:
    stages[0]._rows = rows
    ours, ends = drive(stages, all_of(model))
    assert [type(end) for end in ends] == [Finished] * len(whole)
    for name, pieces in whole.items():
        mine, his = np.concatenate(ours[name], axis=1), np.concatenate(pieces, axis=1)
        assert mine.shape == his.shape
        assert np.abs(mine - his).max() <= 1e-5
    if rows == 1 and model == "dia":  # the other one writes a sentence at once
        assert len(ours["1"]) > 1  # the first sentence is heard before it is at its end


@pytest.mark.parametrize("size", [1, 4, 9])
def test_the_decoder_reaches_as_far_as_its_family_says(stages: tuple[WriteEngine, DecodeEngine], size: int) -> None:
    decode, adapter = stages[1], stages[1]._family.adapter
    ((name, silence),) = adapter.silence(decode._parts).items()
    shape, source = adapter.frame_shape(decode._parts), np.random.default_rng(0)
    frames = (source.random((len(silence), 70)) * 30).astype(silence.dtype)
    window = Windowed(shape, decode._decode)
    chunks = [frames[:, i : i + size] for i in range(0, 70, size)]
    made = [window.push({name: chunk}, i == len(chunks) - 1) for i, chunk in enumerate(chunks)]
    in_chunks = np.concatenate([sound for sound in made if sound is not None], axis=1)
    at_once = decode._decode({name: frames})
    assert in_chunks.shape == at_once.shape == (1, 70 * shape.hop)
    assert np.abs(in_chunks - at_once).max() <= 1e-5


def test_nothing_is_held_afterwards(model: str, stages: tuple[WriteEngine, DecodeEngine]) -> None:
    write, decode = stages
    write._rows = 1
    write.add(ask(model, "a", 3))
    while not write._connector._held:
        write.step()
    write.abort("a")
    assert not write._connector._held
    while write.busy or decode.busy:
        write.step()
        decode.step()
    assert not write.jobs and not decode._jobs


def test_a_decoder_that_fails_ends_that_request_alone(
    model: str, stages: tuple[WriteEngine, DecodeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, calls = stages[1]._family.adapter, []
    works = adapter.decode

    def decode(parts: Any, arrays: Any) -> Any:
        calls.append(arrays)
        if len(calls) == 1:
            raise ValueError("no such code")
        return works(parts, arrays)

    monkeypatch.setattr(adapter, "decode", decode)
    _, ends = drive(stages, [ask(model, "a", 1), ask(model, "b", 1)])
    failed, done = sorted(ends, key=lambda end: isinstance(end, Finished))
    assert isinstance(failed, Failed) and isinstance(done, Finished)
    assert (failed.error.kind, "no such code" in failed.error.message) == ("GenerationError", True)


@pytest.mark.parametrize("level", [1, 2])
def test_the_decoder_sleeps(model: str, stages: tuple[WriteEngine, DecodeEngine], level: int) -> None:
    stages[0]._rows = 25
    before, _ = drive(stages, [ask(model, "a", 1)])
    for engine in stages:
        engine.sleep(level)
        engine.wake_up()
    after, _ = drive(stages, [ask(model, "a", 1)])
    assert all(np.array_equal(x, y) for x, y in zip(before["a"], after["a"], strict=True))


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("end", [0, 3, 20, None])
def test_the_hand_off_is_the_same_in_chunks(size: int, end: int | None) -> None:
    """Channel c is late by its delay, and the first channel says where the frames end."""
    delay, count = np.array([0, 2, 3]), 24
    rows = np.arange(count * 3).reshape(count, 3) + 1000
    if end is not None:
        rows[end, 0] = 5
    kept: Any = {}
    frames = []
    for start in range(0, count, size):
        chunk = {"rows": rows[start : start + size], "delay": delay, "end": np.array(5)}
        out, kept = frames_of(kept, chunk, start + size >= count)
        frames.append(out["codes"])
    got = np.concatenate(frames, axis=1)
    expected = min(count if end is None else end, count - 3)
    assert got.shape == (3, expected)
    assert np.array_equal(got, np.stack([rows[late : late + expected, c] for c, late in enumerate(delay)]))


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("frames", [0, 1, 4, 23])
def test_a_window_is_as_wide_as_it_must_be(size: int, frames: int) -> None:
    """A decoder that mixes each frame with two before and one after it; outside, there is silence."""
    x = np.random.default_rng(0).normal(size=(1, frames))

    def decode(arrays: Any) -> Sound:
        padded = np.pad(arrays["x"], ((0, 0), (2, 1)))
        mixed = padded[:, 3:] + 2 * padded[:, 2:-1] + 4 * padded[:, 1:-2] + 8 * padded[:, :-3]
        return np.repeat(mixed, 3, axis=1)

    window = Windowed(FrameShape(hop=3, before=2, after=1), decode)
    chunks = [x[:, i : i + size] for i in range(0, max(frames, 1), size)]
    made = [window.push({"x": chunk}, i == len(chunks) - 1) for i, chunk in enumerate(chunks)]
    sounds = [sound for sound in made if sound is not None]
    if frames == 0:
        assert not sounds
    else:
        assert np.allclose(np.concatenate(sounds, axis=1), decode({"x": x}))

"""The engine for models that speak: many at once, each on its own, handed out sentence by sentence."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.replica import replica
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.outbound import WINDOW
from polymux.engine.sound_job import AHEAD
from polymux.errors import InvalidRequestError, NotReadyError
from polymux.omni_output import samples_of
from polymux.request import Event, Failed, Finished, Progress, Request, SamplingParams, SoundPiece

TEXT = "hello there. and another one"
Load = Callable[..., GenerateEngine]


@pytest.fixture
def load(tiny_checkpoint: Callable[..., Path]) -> Any:
    made: list[GenerateEngine] = []

    def engine(name: str = "vits", **flags: Any) -> GenerateEngine:
        made.append(GenerateEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint(name)), **flags)))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def request(name: str = "a", text: str = TEXT, seed: int | None = 1, **params: Any) -> Request:
    return Request(request_id=name, prompt=text, sampling=SamplingParams(seed=seed, **params))


def csm(name: str, tokens: int, **params: Any) -> Request:
    return request(name, "hello", max_new_tokens=tokens, **params)


def drive(engine: GenerateEngine, take: bool = True) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        for event in engine.step():
            events.append(event)
            if isinstance(event, SoundPiece) and take:
                engine.taken(event.request_id)
    return events


def sound(events: list[Event], name: str = "a") -> np.ndarray[Any, Any]:
    mine = [e for e in events if isinstance(e, SoundPiece) and e.request_id == name]
    return np.concatenate([samples_of(piece) for piece in mine], axis=1)


def ends(events: list[Event]) -> dict[str, Event]:
    return {e.request_id: e for e in events if isinstance(e, (Finished, Failed))}


def test_sentences_come_in_order_and_are_the_whole(load: Load) -> None:
    engine = load(max_num_seqs=4)
    engine.add(request())
    events = drive(engine)
    pieces = [e for e in events if isinstance(e, SoundPiece)]
    assert [piece.sentence for piece in pieces] == [0, 1]
    finished = ends(events)["a"]
    assert isinstance(finished, Finished) and events[-1] is finished
    assert (finished.outputs, finished.seeds, finished.sample_rate) == ([[]], [1], 16000)
    assert finished.sound_seconds == sound(events).shape[1] / 16000 and finished.metrics.text_tokens > 0
    for text, piece in zip(("hello there.", "and another one"), pieces, strict=True):
        engine.add(request(text=text))
        assert np.array_equal(sound(drive(engine)), samples_of(piece))


def test_a_large_sentence_travels_in_parts(load: Load) -> None:
    whole, parts = load(), load(output_chunk_bytes=1024)
    for engine in (whole, parts):
        engine.add(request())
    wanted, events = sound(drive(whole)), drive(parts)
    assert len([e for e in events if isinstance(e, SoundPiece)]) == sum(
        -(-n * 4 // 1024) for n in (piece.samples.shape[1] for piece in _pieces(whole))
    )
    assert np.array_equal(sound(events), wanted)


def _pieces(engine: GenerateEngine) -> list[SoundPiece]:
    engine.add(request())
    return [e for e in drive(engine) if isinstance(e, SoundPiece)]


def test_a_seed_is_drawn_and_told(load: Load) -> None:
    engine = load()
    engine.add(request(seed=None))
    events = drive(engine)
    (finished,) = ends(events).values()
    assert isinstance(finished, Finished) and finished.seeds[0] is not None
    engine.add(request(seed=finished.seeds[0]))
    assert np.array_equal(sound(drive(engine)), sound(events))


def test_speed(load: Load) -> None:
    engine = load()
    engine.add(request(speed=1.0))
    plain = sound(drive(engine)).shape[1]
    engine.add(request(speed=0.5))
    assert abs(sound(drive(engine)).shape[1] - 2 * plain) <= 2


def test_requests_take_turns(load: Load) -> None:
    """A short one is done long before a long one that came first."""
    engine = load("csm")
    engine.add(csm("long", 40))
    for _ in range(5):
        engine.step()
    engine.add(csm("short", 2))
    assert list(ends(drive(engine))) == ["short", "long"]


def test_places_in_flight(load: Load) -> None:
    engine = load("csm", max_num_seqs=2)
    for i in range(4):
        engine.add(csm(str(i), 3))
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (2, 2)
    assert len(ends(drive(engine))) == 4
    assert (engine.stats.running, engine.stats.waiting) == (0, 0) and engine.stats.steps == 12
    assert engine.stats.seconds["denoise"] > 0 < engine.stats.seconds["decode"]


def test_a_request_has_one_place_however_long_it_is(load: Load) -> None:
    engine = load(max_num_seqs=4)
    engine.add(request("long", text="one. two. three. four. five."))
    engine.add(request("short"))
    while engine.jobs:
        assert all(len(job.sessions) <= 1 for job in engine.jobs.values())
        for event in engine.step():
            if isinstance(event, SoundPiece):
                engine.taken(event.request_id)


def test_progress(load: Load) -> None:
    engine = load("musicgen")
    engine.add(request(text="drums", max_new_tokens=9))
    told = [event for event in drive(engine) if isinstance(event, Progress)]
    assert [p.step for p in told if p.phase == "denoise"] == sorted({p.step for p in told if p.phase == "denoise"})
    assert told[-1].total == 9  # of one that makes as much as it is asked for


def test_abort_ends_it_and_nobody_else(load: Load) -> None:
    engine = load("csm")
    engine.add(csm("alone", 6))
    wanted = sound(drive(engine), "alone")
    for name, tokens in (("stays", 6), ("goes", 200), ("waits", 200)):
        engine.add(csm(name, tokens))
    for _ in range(6):
        engine.step()
    engine.abort("goes")
    engine.abort("waits")
    engine.abort("unknown")
    events = drive(engine)
    assert isinstance(ends(events)["stays"], Finished)
    assert {name: e.error.kind for name, e in ends(events).items() if isinstance(e, Failed)} == {
        "goes": "RequestAbortedError",
        "waits": "RequestAbortedError",
    }
    assert np.array_equal(sound(events, "stays"), wanted)
    assert not engine.scheduler.waiting


def test_one_that_fails_ends_alone(load: Load) -> None:
    engine = load("csm")
    engine.add(csm("alone", 6))
    wanted = sound(drive(engine), "alone")
    component = next(c for c in engine.loaded.components if c.name == "codec_model")
    original = component.entries["decode"].original
    calls = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a fault in the codec")
        return original(*args, **kwargs)

    component.entries["decode"] = type(component.entries["decode"])(
        component.module, "decode", failing, component.entries["decode"].signature, None
    )
    engine.add(csm("fails", 4))
    engine.add(csm("works", 6))
    events = drive(engine)
    failed = ends(events)["fails"]
    assert isinstance(failed, Failed) and "a fault in the codec" in failed.error.message
    assert np.array_equal(sound(events, "works"), wanted)


def test_settings_that_a_model_keeps_reach_nobody_else(load: Load) -> None:
    """This model writes the settings of its small decoder down in that decoder."""
    engine = load("csm")
    kept = engine.loaded.parts.model.depth_decoder.generation_config
    before = kept.to_dict()
    engine.add(csm("plain", 6, do_sample=False))
    wanted = sound(drive(engine), "plain")
    engine.add(csm("warm", 6, temperature=5.0))
    engine.add(csm("plain", 6, do_sample=False))
    events = drive(engine)
    assert np.array_equal(sound(events, "plain"), wanted)
    assert not np.array_equal(sound(events, "warm"), wanted)
    assert kept.to_dict() == before


def test_speech_that_does_not_come_to_its_end_is_no_speech(load: Load) -> None:
    engine = load("speecht5-tts")
    call = {"text": "hello", "extra_args": {"threshold": 1.999}}
    engine.add(request("cut", **call))
    failed = ends(drive(engine))["cut"]
    assert isinstance(failed, Failed) and "had not come to its end" in failed.error.message
    engine.add(request("accepted", **call | {"extra_args": {"threshold": 1.999, "maxlenratio": 2.0}}))
    assert isinstance(ends(drive(engine))["accepted"], Finished)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vits", "你好"), ("vits", "that is 5 $"), ("vits", "hi 🎉"), ("vits", "..."),
        ("speecht5-tts", "naïve 7"), ("bark", "你好 ok"), ("csm", "?!"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_whole(load: Load, name: str, text: str) -> None:
    engine = load(name)
    with pytest.raises(InvalidRequestError) as error:
        engine.add(request(text=f"good. {text}" if text != "?!" and text != "..." else text))
    assert error.value.param == "prompt" and not engine.busy


def test_a_long_text_is_spoken_completely(load: Load) -> None:
    engine = load()
    engine.add(request(text="word " * 400))  # without a single stop
    events = drive(engine)
    assert isinstance(ends(events)["a"], Finished)
    sentences = {e.sentence for e in events if isinstance(e, SoundPiece)}
    assert sentences == set(range(len(sentences))) and len(sentences) == -(-2000 // 300)


def test_a_client_that_reads_slowly_holds_up_nobody(load: Load) -> None:
    engine = load(max_num_seqs=2)
    engine.add(request("slow", text="a word. " * 40))
    pieces: list[SoundPiece] = []
    for _ in range(3000):
        pieces += [e for e in engine.step() if isinstance(e, SoundPiece)]
        if not engine.jobs["slow"].sessions and len(pieces) == WINDOW:
            break
    assert len(pieces) == WINDOW and engine.jobs["slow"].opened <= WINDOW + AHEAD
    engine.add(request("quick"))
    seen: list[Event] = []
    while "quick" in engine.jobs:
        for event in engine.step():
            seen.append(event)
            if isinstance(event, SoundPiece) and event.request_id == "quick":
                engine.taken("quick")
    assert isinstance(ends(seen)["quick"], Finished)
    for _ in range(WINDOW):
        engine.taken("slow")
    assert isinstance(ends(drive(engine))["slow"], Finished)


def test_the_same_id_twice(load: Load) -> None:
    engine = load()
    engine.add(request())
    with pytest.raises(InvalidRequestError, match="in flight"):
        engine.add(request())


def test_sleeping_changes_nothing(load: Load) -> None:
    engine = load()
    engine.add(request())
    wanted = sound(drive(engine))
    for level in (1, 2, 1):
        assert engine.sleep(level) >= 0
        with pytest.raises(NotReadyError, match="asleep"):
            engine.add(request())
        assert engine.step() == []
        engine.wake_up()
        engine.add(request())
        assert np.array_equal(sound(drive(engine)), wanted)
    held = weakref.ref(engine.loaded.parts.model)
    engine.sleep(2)
    gc.collect()
    assert held() is None


def test_the_warm_up_leaves_nothing(load: Load) -> None:
    for name in ("vits", "dia"):
        engine = load(name)
        engine.warm_up()
        assert not engine.busy and engine.stats.running == 0


def test_voices_in_files(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    folder.mkdir()
    for i, name in enumerate(("anna", "ben")):
        np.save(folder / f"{name}.npy", np.full((1, 8), i + 1.0, dtype=np.float32) * np.arange(1, 9))
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("speecht5-tts")), voice_path=str(folder))
    engine = GenerateEngine.load(config)
    assert engine.capabilities.voices == ("anna", "ben")
    long = {"extra_args": {"threshold": 2.0, "maxlenratio": 2.0}, "text": "hello"}
    engine.add(request("first", **long))
    engine.add(request("anna", voice="anna", **long))
    engine.add(request("ben", voice="ben", **long))
    events = drive(engine)
    assert np.array_equal(sound(events, "first"), sound(events, "anna"))
    with pytest.raises(InvalidRequestError, match="anna, ben"):
        engine.add(request(voice="carl"))
    engine.close()


def test_voices_of_a_checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("bark"), folder)
    shapes = {"semantic_prompt": (6,), "coarse_prompt": (2, 9), "fine_prompt": (4, 9)}
    names: dict[str, dict[str, str]] = {}
    for voice, code in (("v/one", 1), ("v/two", 9)):
        names[voice] = {part: f"{voice.replace('/', '_')}_{part}.npy" for part in shapes}
        for part, shape in shapes.items():
            np.save(folder / names[voice][part], np.full(shape, code, dtype=np.int64))
    import json

    (folder / "speaker_embeddings_path.json").write_text(json.dumps({"repo_or_path": "x", **names}))
    engine = GenerateEngine.load(EngineConfig.from_flat(model=str(folder)))
    assert engine.capabilities.voices == ("v/one", "v/two")
    for name, voice in (("default", None), ("one", "v/one"), ("two", "v/two")):
        engine.add(request(name, "hello", voice=voice, max_new_tokens=8, temperature=0.9))
    events = drive(engine)
    assert all(isinstance(end, Finished) for end in ends(events).values()), ends(events)
    assert np.array_equal(sound(events, "default"), sound(events, "one"))
    assert not np.array_equal(sound(events, "two"), sound(events, "one"))
    engine.close()


def test_speakers_of_a_dialogue(load: Load) -> None:
    adapter = load("dia").family.adapter
    assert adapter.pieces("Hi. How are you? [S2] Fine. [S1] Good", None, 100) == [
        "[S1] Hi.", "[S1] How are you?", "[S2] Fine.", "[S1] Good",
    ]  # fmt: skip
    assert adapter.pieces("Hi", "S2", 100) == ["[S2] Hi"]
    with pytest.raises(InvalidRequestError, match="says itself who speaks"):
        adapter.pieces(" [S1] Hi", "S2", 100)


def test_guidance_takes_no_more_of_the_likeliest_than_there_are(load: Load) -> None:
    engine = load("dia")
    for name, top_k in (
        ("own", None),
        ("most", 10**6),
        ("all", engine.loaded.parts.model.config.decoder_config.vocab_size),
    ):
        engine.add(request(name, "hello", guidance_scale=2.0, max_new_tokens=20, top_k=top_k))
    events = drive(engine)
    assert all(isinstance(end, Finished) for end in ends(events).values()), ends(events)
    assert np.array_equal(sound(events, "most"), sound(events, "all"))
    engine.close()


def test_a_replica_shares_weights_and_nothing_else() -> None:
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)), torch.nn.ReLU())
    own = replica(model, 3)
    assert own[0] is not model[0] and {id(p) for p in own.parameters()} == {id(p) for p in model.parameters()}
    own.note = own[1].note = "mine"
    assert not hasattr(model, "note") and not hasattr(model[1], "note")
    assert torch.equal(own(torch.ones(1, 2)), model(torch.ones(1, 2)))

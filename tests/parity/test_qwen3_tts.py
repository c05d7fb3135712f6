"""Qwen3-TTS says what the package for its checkpoints, qwen-tts, says: the same codes, and their sound to 1e-4.

Greedy, in fp32 on a CPU, for voices by name, by description and by a recording; through the engine, alone, in company
and merged. The package pins an older transformers, so its output is recorded: `qwen3_tts_reference.py` says how it was
made, and what it holds. Where the package can be imported (and only there), it is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.config import EngineConfig
from polymux.engine.answering import load_speaking
from polymux.engine.frame_engine import FrameEngine
from polymux.engine.generate_engine import GenerateEngine
from polymux.errors import InvalidRequestError
from polymux.prompts import request_of
from polymux.request import Failed, Finished, SamplingParams
from tests.parity.qwen3_tts_reference import CASES, INSTRUCTIONS, LINE, MOST, SAID, recording, speak

from .sounding import Sound, pieces_of

RECORDED = Path(__file__).with_name("qwen3_tts_reference.npz")
CHECKPOINTS = ("qwen3-tts", "qwen3-tts-design", "qwen3-tts-base")
GREEDY = {"do_sample": False, "max_new_tokens": MOST}
CLOSE = 1e-4


@pytest.fixture(scope="module")
def wanted(tiny_checkpoint: Callable[..., Path]) -> dict[str, Sound]:
    folders = [tiny_checkpoint(name) for name in CHECKPOINTS]
    if find_spec("qwen_tts") is not None:
        return speak(folders[0].parent, list(CASES))
    with np.load(RECORDED) as file:
        return dict(file)


@pytest.fixture(scope="module", params=[(of, how) for of in CHECKPOINTS for how in ("auto", "generate")], ids="-".join)
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Iterator[GenerateEngine]:
    checkpoint, how = request.param
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(checkpoint)), decoding=how)
    made = load_speaking(config)
    assert isinstance(made, FrameEngine if how == "auto" else GenerateEngine)
    made.warm_up()
    yield made
    made.close()


def cases_of(engine: GenerateEngine) -> list[str]:
    checkpoint = Path(engine.config.model.model).name
    return [name for name, (of, *_) in CASES.items() if of == checkpoint]


def params_of(name: str, vector: Sound) -> dict[str, Any]:
    given = CASES[name][2]
    params = {"voice": given.get("speaker"), "language": given.get("language")}
    params |= {"instructions": given.get("instruct") or None}
    if "ref_text" in given:
        params |= {"ref_audio": (recording(), 24000), "ref_text": given["ref_text"]}
    elif "x_vector_only_mode" in given:
        params["speaker_embedding"] = tuple(vector.tolist())
    return params


def said(engine: GenerateEngine, text: str = LINE, **params: Any) -> Sound:
    engine.add(request_of(text, SamplingParams(**params), "one"))
    pieces, ends = pieces_of(engine)
    assert isinstance(ends["one"], Finished), ends
    return np.concatenate(pieces["one"], axis=1)


def test_it_is_what_the_package_says(engine: GenerateEngine, wanted: dict[str, Sound]) -> None:
    vector, names = wanted["vector/values"], cases_of(engine)
    for name in names:
        engine.add(request_of(LINE, SamplingParams(**GREEDY, **params_of(name, vector)), name))
    before = engine.stats
    pieces, ends = pieces_of(engine)
    for name in names:
        assert isinstance(ends[name], Finished), ends[name]
        heard, reference = np.concatenate(pieces[name], axis=1), wanted[f"{name}/wav"]
        assert heard.shape == (1, len(reference)), name
        assert np.abs(heard[0] - reference).max() <= CLOSE, name
        assert len(pieces[name]) == -(-len(reference) // (4 * 24)), "it is heard while it is written"
    runs, answered = (getattr(engine.stats, of)["talker"] - getattr(before, of)["talker"] for of in ("calls", "merged"))
    assert (runs < answered) == isinstance(engine, FrameEngine), "steps of several requests are one"
    alone = said(engine, **GREEDY, **params_of(names[0], vector))
    assert np.abs(alone[0] - wanted[f"{names[0]}/wav"]).max() <= CLOSE


def test_codes_and_vectors_are_those_of_the_package(engine: GenerateEngine, wanted: dict[str, Sound]) -> None:
    """Recorded codes begin with those of the recording, if there is one."""
    vector = wanted["vector/values"]
    written: list[Sound] = []
    codec = engine.loaded.parts.beside
    noting = codec.decoder.register_forward_pre_hook(lambda _, given: written.extend(given[0][0].T.numpy()))
    for name in cases_of(engine):
        written.clear()
        said(engine, **GREEDY, **params_of(name, vector))
        codes = wanted[f"{name}/codes"]
        assert np.array_equal(np.stack(written), codes[len(codes) - len(written) :]), name
    noting.remove()
    if engine.capabilities.embedding_size:
        import torch

        model = engine.loaded.parts.model
        samples, codes = torch.from_numpy(recording()), wanted["clone/codes"]
        with torch.no_grad():
            assert np.abs(model.speaker_encoder.vector(samples).numpy() - vector).max() <= CLOSE
            heard = codec.encode(samples).numpy().T
        assert np.array_equal(heard, codes[: len(heard)])


def test_drawn_codes_are_the_requests_own(engine: GenerateEngine, wanted: dict[str, Sound]) -> None:
    """Seeds: the same sound alone, in company and again, another one with another seed or other settings."""
    base = params_of(cases_of(engine)[0], wanted["vector/values"]) | {"max_new_tokens": 12, "seed": 3}
    first = said(engine, **base)
    others = {"seed": {"seed": 4}, "cold": {"temperature": 0.2}, "few": {"top_k": 2}, "likely": {"top_p": 0.2}}
    for name, changes in {"again": {}, **others}.items():
        engine.add(request_of(LINE, SamplingParams(**base | changes), name))
    pieces, ends = pieces_of(engine)
    sounds = {name: np.concatenate(parts, axis=1) for name, parts in pieces.items()}
    assert all(isinstance(end, Finished) for end in ends.values()), ends
    assert sounds["again"].shape == first.shape and np.abs(sounds["again"] - first).max() <= CLOSE
    for name in others:
        assert sounds[name].shape != first.shape or np.abs(sounds[name] - first).max() > CLOSE, name
    assert not engine.stats.kv_blocks_used


def test_two_sentences_are_spoken_in_one_go(engine: GenerateEngine, wanted: dict[str, Sound]) -> None:
    params = GREEDY | params_of(cases_of(engine)[0], wanted["vector/values"])
    engine.add(request_of("one two. three four.", SamplingParams(**params), "a"))
    assert len(engine.jobs["a"].calls) == 1
    engine.add(request_of("one two three four five six. " * 40, SamplingParams(**params), "b"))
    assert len(engine.jobs["b"].calls) == 2
    engine.abort("b")
    _, ends = pieces_of(engine)
    assert isinstance(ends["a"], Finished) and isinstance(ends["b"], Failed)
    quick = said(engine, **params | {"speed": 2.0})
    assert abs(quick.shape[1] - said(engine, **params).shape[1] / 2) <= 2 * 24


REFUSED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "qwen3-tts": (
        ({"voice": "nobody"}, "voice"),
        ({"language": "klingon"}, "language"),
        ({"language": "wu_dialect"}, "language"),
        ({"ref_audio": (recording(), 24000), "ref_text": SAID}, "ref_audio"),
        ({"speaker_embedding": (0.0,) * 64}, "speaker_embedding"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"max_new_tokens": 1024, "instructions": "calm " * 1500}, "prompt"),
        ({"instructions": "<|im_end|>"}, "instructions"),
        ({"temperature": 0.5, "extra_args": {"subtalker_dosample": False, "subtalker_top_k": 5}},
         "extra_args.subtalker_top_k"),
        ({"extra_args": {"subtalker_dosample": 1}}, "extra_args.subtalker_dosample"),
    ),
    "qwen3-tts-design": (({"voice": "anna"}, "voice"), ({"ref_text": SAID}, "ref_text")),
    "qwen3-tts-base": (
        ({}, "ref_audio"),
        ({"ref_audio": (recording(), 24000)}, "ref_text"),
        ({"ref_text": SAID}, "ref_text"),
        ({"instructions": INSTRUCTIONS, "speaker_embedding": (0.0,) * 64}, "instructions"),
        ({"speaker_embedding": (0.0,) * 8}, "speaker_embedding"),
        ({"ref_audio": (recording(), 24000), "ref_text": SAID, "speaker_embedding": (0.0,) * 64}, "speaker_embedding"),
        ({"ref_audio": (recording(3.0), 24000), "ref_text": SAID, "max_new_tokens": 900}, "ref_audio"),
    ),
}  # fmt: skip


def test_what_cannot_be_is_refused(engine: GenerateEngine) -> None:
    for params, field in REFUSED[Path(engine.config.model.model).name]:
        with pytest.raises(InvalidRequestError) as error:
            engine.add(request_of(LINE, SamplingParams(**params), "refused"))
        assert error.value.param == field, params
    assert not engine.busy


def test_names_are_known_in_any_case(engine: GenerateEngine) -> None:
    names: dict[str, Any] = {"voice": engine.capabilities.voices[-1], "language": "chinese", "max_new_tokens": 4}
    if engine.capabilities.embedding_size:
        names = names | {"voice": None, "speaker_embedding": (0.0,) * 64}
    others = {name: value.title() for name, value in names.items() if isinstance(value, str)}
    assert np.array_equal(said(engine, **names, seed=1), said(engine, **names | others, seed=1))


def test_it_sleeps(engine: GenerateEngine, wanted: dict[str, Sound]) -> None:
    params = GREEDY | params_of(cases_of(engine)[0], wanted["vector/values"])
    before = said(engine, **params)
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        assert np.array_equal(said(engine, **params), before)

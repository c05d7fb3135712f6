"""CSM's sentences that are written together say what transformers' own `generate` says: the same codes, and their sound
to 1e-4.

Greedy, in fp32 on a CPU: alone, in company, with the voice of a recording, to the end that the model finds itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.answering import load_speaking
from polymux.engine.frame_engine import FrameEngine
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.sentence import Sentence
from polymux.errors import InvalidRequestError
from polymux.prompts import request_of
from polymux.request import Failed, Finished, SamplingParams

from .sounding import Sound, pieces_of

LINES = ["hello there", *(f"{'a cat and ' * i}a dog" for i in range(8))]
ENDING = LINES[6]
FRAMES = 22  # more than the codec's window
GREEDY: dict[str, Any] = {"voice": "3", "temperature": 0, "max_new_tokens": FRAMES}
LIKELIEST = {"do_sample": False, "depth_decoder_do_sample": False}
CLOSE = 1e-4
Codes = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("csm")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[FrameEngine]:
    made = loaded(folder)
    assert isinstance(made, FrameEngine)
    made.warm_up()
    yield made
    made.close()


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Codes:
    """Of the frames of each request, as they are written."""
    noted: Codes = {}
    take = Sentence.take

    def noting(self: Sentence, codes: list[int], verdict: tuple[bool, bool]) -> None:
        if codes[:-1]:
            noted.setdefault(self.job.request.request_id, []).append(codes[:-1])
        take(self, codes, verdict)

    monkeypatch.setattr(Sentence, "take", noting)
    return noted


def loaded(folder: Path, **flat: Any) -> GenerateEngine:
    engine = load_speaking(EngineConfig.from_flat(model=str(folder), **flat))
    assert isinstance(engine, GenerateEngine)
    return engine


def said(engine: GenerateEngine, *requests: tuple[str, str, dict[str, Any]]) -> dict[str, Sound]:
    for name, text, params in requests:
        engine.add(request_of(text, SamplingParams(**params), name))
    pieces, ends = pieces_of(engine)
    assert all(isinstance(end, Finished) for end in ends.values()), ends
    return {name: np.concatenate(parts, axis=1)[0] for name, parts in pieces.items()}


def by_transformers(folder: Path, text: str, frames: int = FRAMES) -> tuple[list[list[int]], Sound]:
    """Codes and sound."""
    model, processor = T.CsmForConditionalGeneration.from_pretrained(folder), T.CsmProcessor.from_pretrained(folder)
    words = f"<|begin_of_text|>[3]{text}<|end_of_text|>"
    given = processor(words, add_special_tokens=False, return_tensors="pt") | LIKELIEST | {"max_new_tokens": frames}
    written: list[list[int]] = model.generate(**given)[0].tolist()
    sound: Sound = model.generate(**given, output_audio=True)[0].numpy()
    return written, sound


def recording(samples: int = 900) -> Sound:
    return (0.3 * np.sin(np.arange(samples) * 0.115)).astype(np.float32)


def test_it_is_what_transformers_says(engine: FrameEngine, folder: Path, codes: Codes) -> None:
    wanted, sound = by_transformers(folder, LINES[0])
    alone = said(engine, ("alone", LINES[0], GREEDY))
    before = engine.stats
    cloned = {"ref_audio": (recording(), 24000), "ref_text": "what i said", "max_new_tokens": 9}
    others = [(str(i), line, GREEDY | ({} if i % 2 else cloned)) for i, line in enumerate(LINES[1:])]
    company = said(engine, ("company", LINES[0], GREEDY), *others)
    for name, heard in (("alone", alone["alone"]), ("company", company["company"])):
        assert codes[name] == wanted, name
        assert heard.shape == sound.shape and np.abs(heard - sound).max() <= CLOSE, name
    runs, answered = (
        getattr(engine.stats, of)["backbone_model"] - getattr(before, of)["backbone_model"]
        for of in ("calls", "merged")
    )
    assert runs < answered and not engine.stats.kv_blocks_used
    assert codes["1"] == by_transformers(folder, LINES[2])[0]


def test_other_tier_and_voices_of_recordings(engine: FrameEngine, folder: Path) -> None:
    """`--decoding generate` is transformers' own loop, which test_speech.py and test_reference_voices.py hold to it."""
    params = GREEDY | {"ref_audio": (recording(), 24000), "ref_text": "what i said"}
    apart = loaded(folder, decoding="generate")
    assert not isinstance(apart, FrameEngine)
    wanted = said(apart, ("a", LINES[2], params))["a"]
    engine.add(request_of(LINES[2], SamplingParams(**params), "a"))
    pieces, ends = pieces_of(engine)
    heard = np.concatenate(pieces["a"], axis=1)[0]
    apart.close()
    assert heard.shape == wanted.shape and np.abs(heard - wanted).max() <= CLOSE
    assert isinstance(ends["a"], Finished) and ends["a"].metrics.steps == FRAMES
    assert np.abs(heard - said(engine, ("a", LINES[2], GREEDY))["a"]).max() > CLOSE


def test_drawn_codes_are_the_requests_own(engine: FrameEngine, codes: Codes) -> None:
    """By seed; and the codes of a frame but the first by settings of their own."""
    drawn: dict[str, Any] = {"voice": "3", "max_new_tokens": 9, "seed": 3, "temperature": 1.5}
    said(engine, ("first", LINES[0], drawn))
    variants: dict[str, dict[str, Any]] = {
        "again": {},
        "seed": {"seed": 4},
        "cold": {"temperature": 0.1},
        "greedy": {"temperature": 0},
        "one": {"top_k": 1},
        "others": {"temperature": 0, "extra_args": {"depth_decoder_do_sample": True}},
        "others_one": {"temperature": 0, "extra_args": {"depth_decoder_do_sample": True, "depth_decoder_top_k": 1}},
        "first_one": {"extra_args": {"depth_decoder_do_sample": False}},
    }
    said(engine, *((name, LINES[0], drawn | more) for name, more in variants.items()))
    assert codes["again"] == codes["first"]
    assert all(codes[name] != codes["first"] for name in ("seed", "cold", "greedy"))
    assert codes["one"] == codes["others_one"] == codes["greedy"]
    assert codes["others"][0][0] == codes["greedy"][0][0] and codes["others"] != codes["greedy"]
    assert codes["first_one"][0][0] == codes["first"][0][0] and codes["first_one"] != codes["first"]


@torch.no_grad()
def ending(folder: Path, place: Path, at: int) -> Path:
    """A checkpoint whose greedy sentences end: the first code of a frame is followed by ends only, and is one
    itself from the frame `at` on."""
    model = T.CsmForConditionalGeneration.from_pretrained(folder)
    shutil.copytree(folder, place)
    model.depth_decoder.codebooks_head.weight.zero_()
    model.save_pretrained(place)
    firsts = [frame[0] for frame in by_transformers(place, ENDING)[0]]
    code = next(code for i, code in enumerate(firsts) if i >= at and code not in (0, *firsts[:i]))
    rows = model.lm_head.weight
    rows[[0, code]] = rows[[code, 0]]
    model.save_pretrained(place)
    return place


def test_it_comes_to_its_end(folder: Path, tmp_path: Path, codes: Codes) -> None:
    """The last frame is no sound; without a limit it is the end, too."""
    place = ending(folder, tmp_path / "ending", 4)
    wanted, sound = by_transformers(place, ENDING)
    assert 4 < len(wanted) < FRAMES and wanted[-1] == [0, 0, 0, 0] and len(sound) == 48 * (len(wanted) - 1)
    engine = loaded(place)
    assert isinstance(engine, FrameEngine)
    free = {name: value for name, value in GREEDY.items() if name != "max_new_tokens"}
    for name, params in {"limited": GREEDY, "free": free, "just": GREEDY | {"max_new_tokens": len(wanted)}}.items():
        heard = said(engine, (name, ENDING, params))[name]
        assert codes[name] == wanted and heard.shape == sound.shape and np.abs(heard - sound).max() <= CLOSE, name
    with torch.no_grad():
        engine.loaded.parts.model.lm_head.weight.zero_()
    engine.add(request_of(LINES[0], SamplingParams(**GREEDY), "silent"))
    _, ends = pieces_of(engine)
    assert isinstance(ends["silent"], Failed) and "before there was a sound" in ends["silent"].error.message
    assert not engine.busy and not engine.stats.kv_blocks_used
    assert [engine._writer.verdict(c) for c in ([7], [0], [0, 0, 0, 5, 0], [0, 0, 0, 0, 9], [0, 0, 1, 0, 0])] == [
        (False, False), (False, False), (True, True), (False, True), (True, False),
    ]  # fmt: skip
    engine.close()


@pytest.mark.parametrize(("file", "setting"), [("generation_config", "min_p"), ("config", "trim_right_ratio")])
def test_checkpoints_that_are_not_written_together(folder: Path, tmp_path: Path, file: str, setting: str) -> None:
    """What is not acted on here is left to `generate`."""
    place = tmp_path / "other"
    shutil.copytree(folder, place)
    values = json.loads((place / f"{file}.json").read_text())
    if file == "config":
        values["codec_config"][setting] = 0.5
    else:
        values |= {"do_sample": True, "temperature": 0.7, setting: 0.1}
    (place / f"{file}.json").write_text(json.dumps(values))
    engine = loaded(place)
    assert not isinstance(engine, FrameEngine)
    engine.close()


def test_settings_of_a_checkpoint(engine: FrameEngine) -> None:
    own = engine.loaded.own().model
    own.generation_config.update(do_sample=True, temperature=0.5, top_k=7)
    own.depth_decoder.generation_config.update(do_sample=True, top_p=0.5)
    given = {"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 5, "depth_decoder_temperature": 2.0}
    how = own.start(given).rows.how[0].tolist()
    assert how == [[1.0, 0.5, 7.0, 1.0, 1.0], [1.0, 2.0, 50.0, 0.5, 1.0]]


def test_it_sleeps_stretches_and_refuses(engine: FrameEngine) -> None:
    before = said(engine, ("a", LINES[0], GREEDY))["a"]
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        assert np.array_equal(said(engine, ("a", LINES[0], GREEDY))["a"], before)
    quick = said(engine, ("a", LINES[0], GREEDY | {"speed": 2.0}))["a"]
    assert abs(len(quick) - len(before) / 2) <= 2 * 48
    with pytest.raises(InvalidRequestError, match="models that write several codes at once"):
        engine.add(request_of(LINES[0], SamplingParams(repetition_penalty=1.1), "refused"))

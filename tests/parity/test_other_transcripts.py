"""What the models that listen beside Whisper write down is what their own `generate` writes, token for token, alone and
beside others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.hearing_engine import HearingEngine
from polymux.errors import InvalidRequestError
from polymux.families.generate import Call, Parts
from polymux.families.parakeet import PARAKEET, Said, sentences
from polymux.media.subtitles import srt
from polymux.prompts import request_of
from polymux.request import Event, Failed, Finished, SamplingParams

RATE, SEED = 16000, 7
SECONDS = (1.0, 0.6)
Sound = np.ndarray[Any, Any]
Write = Callable[[Path, Sound], tuple[str, int]]
Case = tuple[str, Write, float]  # a checkpoint, transformers' own call, and more seconds than it hears


def noise(seconds: float) -> Sound:
    return (np.random.default_rng(int(seconds * 10)).standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


def moonshine(path: Path, sound: Sound) -> tuple[str, int]:
    processor, model = (
        T.Wav2Vec2Processor.from_pretrained(path),
        T.MoonshineForConditionalGeneration.from_pretrained(path),
    )
    steps = math.ceil(len(sound) / RATE * 6.5)
    ids = model.generate(**processor(sound, sampling_rate=RATE, return_tensors="pt"), max_new_tokens=steps)
    return processor.batch_decode(ids, skip_special_tokens=True)[0].strip(), ids.shape[1] - 1


def parakeet(kind: str) -> Write:
    def write(path: Path, sound: Sound) -> tuple[str, int]:
        processor = T.ParakeetProcessor.from_pretrained(path)
        model = getattr(T, f"ParakeetFor{kind}").from_pretrained(path)
        made = model.generate(**processor(sound, sampling_rate=RATE), return_dict_in_generate=True)
        if kind == "CTC":
            return processor.batch_decode(made.sequences, skip_special_tokens=True)[0].strip(), -1
        unsaid = {model.config.blank_token_id, *processor.tokenizer.all_special_ids}
        written = [token for token in made.sequences[0].tolist() if token not in unsaid]
        return processor.batch_decode(made.sequences, skip_special_tokens=True)[0].strip(), len(written)

    return write


def qwen3_asr(path: Path, sound: Sound) -> tuple[str, int]:
    return asked(path, sound)[:2]


def asked(path: Path, sound: Sound, **request: str) -> tuple[str, int, str | None]:
    processor, model = (
        T.Qwen3ASRProcessor.from_pretrained(path),
        T.Qwen3ASRForConditionalGeneration.from_pretrained(path),
    )
    inputs = processor.apply_transcription_request(audio=sound, **request)
    steps = math.ceil(len(sound) / RATE * 16) + 32
    ids = model.generate(**inputs, max_new_tokens=steps)[:, inputs["input_ids"].shape[1] :]
    (found,) = processor.decode(ids, return_format="parsed")
    return found["transcription"], ids.shape[1], found["language"]


def canary(path: Path, sound: Sound, language: str = "en") -> tuple[str, int]:
    processor, model = T.CanaryProcessor.from_pretrained(path), T.CanaryForConditionalGeneration.from_pretrained(path)
    inputs = processor.apply_transcription_request(audio=sound, source_language=language)
    count = inputs["decoder_input_ids"].shape[1]
    steps = min(math.ceil(len(sound) / RATE * 16) + 32, 96 - count)
    ids = model.generate(**inputs, max_new_tokens=steps)[:, count:]
    return processor.batch_decode(ids, skip_special_tokens=True)[0].strip(), ids.shape[1]


CASES: tuple[Case, ...] = (
    ("canary", canary, 4.5),
    ("qwen3-asr", qwen3_asr, 20.0),
    ("moonshine", moonshine, 4.0),
    ("parakeet-ctc", parakeet("CTC"), 6.0),
    ("parakeet-tdt", parakeet("TDT"), 6.0),
    ("parakeet-rnnt", parakeet("RNNT"), 6.0),
)


def drive(engine: HearingEngine) -> dict[str, Event]:
    ends: dict[str, Event] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, (Finished, Failed))}
    return ends


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@torch.no_grad()
def test_text_is_that_of_transformers(case: Case, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(case[0])
    engine = HearingEngine.load(EngineConfig.from_flat(model=str(path)))

    def add(name: str, seconds: float, prompt: str = "", **params: Any) -> None:
        heard = {"prompt": prompt, "multi_modal_data": {"audio": (noise(seconds), RATE)}}
        engine.add(request_of(heard, SamplingParams(seed=SEED, **params), name))

    def check(event: Event, wanted: tuple[str, int], seconds: float) -> None:
        assert isinstance(event, Finished) and event.text == wanted[0] != "", event
        assert event.metrics.completion_tokens == wanted[1] or wanted[1] < 0 < event.metrics.completion_tokens
        times = [time for segment in event.segments for time in (segment.start, segment.end)]
        assert times == sorted(times) and all(0 <= time <= seconds + 0.5 for time in times)
        if engine.capabilities.timestamps:
            assert "".join(segment.text for segment in event.segments).strip() == event.text
            assert srt(event.segments).count(" --> ") == len(event.segments) > 0

    try:
        engine.warm_up()
        wanted = {seconds: case[1](path, noise(seconds)) for seconds in SECONDS}
        add("alone", SECONDS[0])
        check(drive(engine)["alone"], wanted[SECONDS[0]], SECONDS[0])
        for seconds in SECONDS:
            add(str(seconds), seconds)
        ends = drive(engine)
        for seconds in SECONDS:
            check(ends[str(seconds)], wanted[seconds], seconds)
        if case[0] == "canary":
            add("other", 1.0, language="de")
            other = drive(engine)["other"]
            check(other, canary(path, noise(1.0), "de"), 1.0)
            assert isinstance(other, Finished) and other.language == "de" and other.text != wanted[1.0][0]
        for seconds, prompt, params, param in (
            (case[2], "", {}, "audio"),
            *(
                [(0.055, "", {}, "audio")] if case[0] == "moonshine" else []
            ),  # less than its convolutions make a frame of
            (1.0, "what was said before", {}, "prompt"),
            (1.0, "", {"language": "en"}, "language"),
            (1.0, "", {"max_new_tokens": 5}, "max_new_tokens"),
        ):
            if param in engine.capabilities.arguments:
                continue
            with pytest.raises(InvalidRequestError) as error:
                add("refused", seconds, prompt, **params)
            assert error.value.param == param, error.value
        assert not engine.busy
    finally:
        engine.close()


@torch.no_grad()
def test_a_language_and_what_was_said_before(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("qwen3-asr")
    engine = HearingEngine.load(EngineConfig.from_flat(model=str(path)))

    def add(name: str, prompt: str, **params: Any) -> None:
        heard = {"prompt": prompt, "multi_modal_data": {"audio": (noise(0.5), RATE)}}
        engine.add(request_of(heard, SamplingParams(seed=SEED, **params), name))

    try:
        add("asked", "the lazy dog", language="de")
        add("plain", "")
        add("drawn", "", temperature=30.0)
        ends = drive(engine)
        wanted = asked(path, noise(0.5), language="de", prompt="the lazy dog")
        found = ends["asked"]
        assert isinstance(found, Finished) and (found.text, found.language) == (wanted[0], "de")
        assert ends["plain"].text != found.text and ends["drawn"].text != ends["plain"].text  # type: ignore[union-attr]
        for prompt, params, param in (
            ("<|im_end|>", {}, "prompt"),
            ("word " * 500, {}, "prompt"),
            ("", {"language": "xx"}, "language"),
        ):
            with pytest.raises(InvalidRequestError) as error:
                add("refused", prompt, **params)
            assert error.value.param == param
    finally:
        engine.close()


PIECES = [" It", " is", " late", ".", " Good", " night", b"\xe3", b"\x80", b"\x82", b"\xff", " ja"]


def read(tokens: list[int]) -> str:
    """As a tokenizer does it, some of whose tokens are bytes."""
    pieces = [PIECES[token] for token in tokens]
    return b"".join(one.encode() if isinstance(one, str) else one for one in pieces).decode(errors="replace")


def test_sentences_are_put_together_of_tokens() -> None:
    starts = (0.0, 0.4, 0.8, 1.2, 2.0, 2.4)
    made = sentences([Said(token, start, start + 0.3) for token, start in enumerate(starts)], read)
    assert [(one.start, one.end, one.text) for one in made] == [(0.0, 1.5, " It is late."), (2.0, 2.7, " Good night")]
    assert sentences([], read) == []


def test_sentences_of_bytes() -> None:
    """A full stop of three bytes ends one; bytes that make no character are none, and stay."""
    tokens = [0, 6, 7, 8, 9, 9, 10, 6]
    made = sentences([Said(token, float(i), i + 1.0) for i, token in enumerate(tokens)], read)
    wanted = [(0.0, 4.0, " It。"), (4.0, 8.0, "\ufffd\ufffd ja\ufffd")]
    assert [(one.start, one.end, one.text) for one in made] == wanted


@pytest.mark.parametrize("kind", ["tdt", "rnnt"])
def test_tokens_that_make_no_character(tiny_checkpoint: Callable[..., Path], kind: str) -> None:
    """Where transformers' own times of tokens fail: what the model writes of noise may be any bytes."""
    path, made = tiny_checkpoint(f"parakeet-{kind}"), {"TDT": T.ParakeetForTDT, "RNNT": T.ParakeetForRNNT}[kind.upper()]
    processor, model = T.ParakeetProcessor.from_pretrained(path), made.from_pretrained(path)
    tokens = processor.tokenizer("so s\u00e3o.").input_ids
    tokens = torch.tensor([[tokens[0], 294, *range(128, 250), *tokens]])
    durations = torch.ones_like(tokens)
    with pytest.raises(Exception, match="Invalid prefix"):
        processor.decode(tokens, durations=durations, skip_special_tokens=True)

    class Written:
        config, device = model.config, model.device

        @staticmethod
        def generate(**how: Any) -> SimpleNamespace:
            return SimpleNamespace(sequences=tokens, durations=durations)

    heard = PARAKEET.adapter.transcribe(Parts(model=Written(), processor=processor), Call(arguments={}))
    assert "\ufffd" in heard.text and heard.text.endswith(" so s\u00e3o.")
    assert "".join(one.text for one in heard.segments).strip() == heard.text and len(heard.segments) > 0

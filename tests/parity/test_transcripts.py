"""What a model of transformers writes down through the engine is what its own `generate` writes, token for token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.hearing_engine import HearingEngine
from polymux.errors import InvalidRequestError
from polymux.families.whisper import _Progress
from polymux.prompts import request_of
from polymux.request import Event, Failed, Finished, SamplingParams

RATE, SEED = 16000, 7
Sound = np.ndarray[Any, Any]


def noise(seconds: float, seed: int = 0) -> Sound:
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


def reference(model: Any, processor: Any, sound: Sound, prompt: str | None, **how: Any) -> list[tuple[float, ...]]:
    """(start, end, *tokens) of each segment; times do not pass the end of the sound."""
    window = processor.feature_extractor.n_samples
    long = dict(truncation=False, padding="longest", return_attention_mask=True) if len(sound) > window else {}
    inputs = processor(sound, sampling_rate=RATE, return_tensors="pt", **long)
    if prompt is not None:
        how["prompt_ids"] = processor.get_prompt_ids(prompt, return_tensors="pt")
    torch.manual_seed(SEED)
    made = model.generate(**inputs, **how, task="transcribe", return_timestamps=True, return_segments=True)
    end = len(sound) / RATE
    times = [[min(round(float(s[name]), 3), end) for name in ("start", "end")] for s in made["segments"][0]]
    return [(*time, *s["tokens"].tolist()) for time, s in zip(times, made["segments"][0], strict=True)]


def drive(engine: HearingEngine) -> dict[str, Event]:
    ends: dict[str, Event] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, (Finished, Failed))}
    return ends


def shape(event: Event) -> list[tuple[float, ...]]:
    assert isinstance(event, Finished), event
    return [(segment.start, segment.end, *segment.tokens) for segment in event.segments]


@torch.no_grad()
def test_text_is_that_of_transformers(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("whisper")
    engine = HearingEngine.load(EngineConfig.from_flat(model=str(path)))
    cases: dict[str, tuple[Sound, str | None, dict[str, Any]]] = {
        "short": (noise(1), None, {}),
        "window": (noise(2, 1), None, {"language": "de"}),
        "long": (noise(4.3, 2), None, {}),
        "drawn": (noise(3, 3), None, {"temperature": 40.0}),
        "prompted": (noise(1.5, 4), "the lazy dog", {"temperature": 0.0}),
        "again": (noise(4.3, 2), "a cat", {"language": "en"}),
    }

    def add(name: str, seed: int = SEED) -> None:
        sound, prompt, how = cases[name]
        engine.add(
            request_of(
                {"prompt": prompt or "", "multi_modal_data": {"audio": (sound, RATE)}},
                SamplingParams(seed=seed, **how),
                name,
            )
        )

    try:
        engine.warm_up()
        model = T.WhisperForConditionalGeneration.from_pretrained(path)
        processor = T.WhisperProcessor.from_pretrained(path)
        wanted = {
            name: reference(copy.deepcopy(model), processor, sound, prompt, **how)
            for name, (sound, prompt, how) in cases.items()
        }
        for name in cases:
            add(name)
            ends = drive(engine)
            assert shape(ends[name]) == wanted[name], name
        for name in cases:
            add(name)
        ends = drive(engine)
        assert {name: shape(ends[name]) for name in cases} == wanted
        add("drawn", seed=8)
        assert shape(drive(engine)["drawn"]) != wanted["drawn"]
        add("again")
        finished = drive(engine)["again"]
        assert isinstance(finished, Finished) and finished.language == "en" and finished.finish_reason == "stop"
        assert finished.metrics.completion_tokens == sum(len(s.tokens) for s in finished.segments)
        tok = processor.tokenizer
        whole = "".join(tok.decode(list(map(int, s[2:])), skip_special_tokens=True) for s in wanted["again"]).strip()
        assert finished.text == whole
        engine.sleep(2)
        engine.wake_up()
        add("short")
        heard = drive(engine)["short"]
        assert shape(heard) == wanted["short"]
        assert isinstance(heard, Finished) and heard.language in ("en", "de", "ja")
    finally:
        engine.close()


def test_what_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = HearingEngine.load(
        EngineConfig.from_flat(model=str(tiny_checkpoint("whisper")), max_input_audio_seconds=9)
    )
    sound = (noise(1), RATE)

    def add(prompt: Any, **params: Any) -> None:
        engine.add(request_of(prompt, SamplingParams(**params), "refused"))

    def heard(audio: Any, prompt: str = "") -> dict[str, Any]:
        return {"prompt": prompt, "multi_modal_data": {"audio": audio}}

    try:
        for prompt, params, param in (
            ("hello", {}, "audio"),
            (heard([sound, sound]), {}, "audio"),
            (heard((np.zeros((3, 100), np.float32), RATE)), {}, "audio"),
            (heard((noise(1) * np.nan, RATE)), {}, "audio"),
            (heard((noise(10), RATE)), {}, "audio"),
            (heard(noise(1)), {}, "audio"),
            (heard(sound, "<|en|> hello"), {}, "prompt"),
            (heard(sound, "word " * 40), {}, "prompt"),
            (heard(sound), {"language": "xx"}, "language"),
            (heard(sound), {"voice": "1"}, "voice"),
            (heard(sound), {"max_new_tokens": 5}, "max_new_tokens"),
            (heard(sound), {"ref_audio": sound, "ref_text": "a"}, "ref_audio"),
        ):
            with pytest.raises(InvalidRequestError) as error:
                add(prompt, **params)
            assert error.value.param == param, (params, error.value)
        assert not engine.busy
    finally:
        engine.close()


def test_a_model_that_does_not_come_on_ends() -> None:
    progress = _Progress()
    for seek in (0, 0, 0, 100, 100, 200):
        progress.check([[seek, 1000]])
    with pytest.raises(Exception, match="does not come to an end"):
        for _ in range(3):
            progress.check([[200, 1000]])

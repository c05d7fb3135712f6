"""Higgs Audio v2 through the engine is transformers' own call, sample for sample, alone and in company.

Its codec exists only where torchaudio is installed. Elsewhere another one stands in for it, which knows the same calls:
then all but the codec is proven.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from safetensors.torch import save_file

from polymux.config import EngineConfig
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.generate_model import GenerateModel
from polymux.errors import CheckpointError, InvalidRequestError
from polymux.families.generate import Parts
from polymux.families.higgs import HIGGS
from polymux.prompts import request_of
from polymux.request import Finished, SamplingParams
from polymux.testing.tiny.makers.codecs import dac_config

from .sounding import Sound, drive

RATE, SEED = 24000, 5
LINE, SAID, SCENE = "hello there my friend", "what I said", "a large hall"
CASES: dict[str, dict[str, Any]] = {
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 12, "max_new_tokens": 12},
    "likeliest": {"do_sample": False, "instructions": SCENE, "max_new_tokens": 9},
    "heard": {"ref_text": SAID, "temperature": 0.7, "max_new_tokens": 11},
}


class StandIn(T.DacModel):  # type: ignore[misc]
    def encode(self, input_values: torch.Tensor) -> Any:
        return super().encode(input_values)

    def decode(self, codes: torch.Tensor) -> Any:
        return super().decode(audio_codes=codes)


def recording() -> Sound:
    return (0.3 * np.sin(np.arange(2400) * 440 * 2 * np.pi / RATE)).astype(np.float32)


def parts_in(path: Path) -> Parts:
    torch.manual_seed(0)
    if find_spec("torchaudio"):
        codec: Any = T.HiggsAudioV2TokenizerModel.from_pretrained(path / "audio_tokenizer")
    else:
        config = dac_config(books=4)
        config.num_quantizers, config.sample_rate = 4, RATE
        codec = StandIn(config).eval()
    features, tok = T.DacFeatureExtractor.from_pretrained(path), T.AutoTokenizer.from_pretrained(path)
    marks = {"audio_stream_bos_id": 32, "audio_stream_eos_id": 33, "chat_template": tok.chat_template}
    processor = T.HiggsAudioV2Processor(features, tok, codec, **marks)
    model = T.HiggsAudioV2ForConditionalGeneration.from_pretrained(path)
    return Parts(model=model, processor=processor, beside=codec)


def reference(parts: Parts, name: str) -> tuple[Sound, int]:
    """And how many tokens the model reads."""
    how = dict(CASES[name])
    said, scene = how.pop("ref_text", None), how.pop("instructions", "Audio is recorded from a quiet room.")
    turns = [("system", "Generate audio following instruction."), ("scene", scene), ("user", LINE)]
    made = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    if said is not None:
        made[2:2] = [
            {"role": "user", "content": [{"type": "text", "text": said}]},
            {"role": "assistant", "content": [{"type": "audio", "audio": recording()}]},
        ]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = parts.processor.apply_chat_template(made, **options)
    model = copy.deepcopy(parts.model)
    torch.manual_seed(SEED)
    codes = model.generate(**inputs, **{"do_sample": "temperature" in how} | how)
    sound: Sound = parts.processor.batch_decode(codes)[0].reshape(1, -1).numpy()
    return sound, int(inputs["attention_mask"].sum())


@pytest.fixture
def engine(tiny_checkpoint: Callable[..., Path]) -> Iterator[tuple[GenerateEngine, dict[str, tuple[Sound, int]]]]:
    path, device = tiny_checkpoint("higgs-audio-v2"), torch.device("cpu")
    parts = parts_in(path)
    with torch.no_grad():
        wanted = {name: reference(parts, name) for name in CASES}
    made = GenerateEngine(EngineConfig.from_flat(model=str(path)), GenerateModel.of(HIGGS, parts, device), device)
    yield made, wanted
    made.close()


def test_sound_is_that_of_transformers(engine: tuple[GenerateEngine, dict[str, tuple[Sound, int]]]) -> None:
    made, references = engine
    wanted, read = ({name: pair[i] for name, pair in references.items()} for i in range(2))

    def add(name: str, **changes: Any) -> None:
        heard = {"ref_audio": (recording(), RATE)} if "ref_text" in CASES.get(name, {}) | changes else {}
        params = {"seed": SEED} | CASES.get(name, CASES["drawn"]) | heard | changes
        made.add(request_of(LINE, SamplingParams(**params), name))

    made.warm_up()
    for name in CASES:
        add(name)
        sounds, ends = drive(made)
        assert isinstance(ends[name], Finished), ends
        assert np.array_equal(sounds[name], wanted[name]), name
    for name in CASES:
        add(name)
    add("other", seed=6)
    sounds, ends = drive(made)
    assert all(isinstance(end, Finished) for end in ends.values()), ends
    assert all(np.array_equal(sounds[name], wanted[name]) for name in CASES)
    assert not np.array_equal(sounds["other"], wanted["drawn"])
    add("scene", instructions=SCENE)
    told = {**ends, **drive(made)[1]}
    for name, tokens in read.items():
        assert 0 <= told[name].metrics.text_tokens - tokens <= (name == "heard"), name  # type: ignore[union-attr]
    assert told["scene"].metrics.text_tokens != read["drawn"]  # type: ignore[union-attr]
    for changes, param in (
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"instructions": "<|eot_id|>"}, "instructions"),
        ({"max_new_tokens": 4}, "max_new_tokens"),
        ({"ref_text": "<|AUDIO|>"}, "ref_text"),
        ({"ref_text": "word " * 2000}, "ref_audio"),
        ({"voice": "anna"}, "voice"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            add("refused", **changes)
        assert error.value.param == param, changes


def test_it_is_loaded_with_torchaudio_or_says_that_it_needs_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = str(tiny_checkpoint("higgs-audio-v2"))
    if not find_spec("torchaudio"):
        T.HiggsAudioV2TokenizerConfig().save_pretrained(tmp_path)
        save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="torchaudio"):
            GenerateEngine.load(EngineConfig.from_flat(model=path, vocoder=str(tmp_path)))
        return
    engine = GenerateEngine.load(EngineConfig.from_flat(model=path, dtype="bf16"))
    try:
        params = SamplingParams(ref_audio=(recording(), RATE), ref_text=SAID, seed=SEED, max_new_tokens=8)
        engine.add(request_of(LINE, params, "a"))
        sounds, ends = drive(engine)
        assert isinstance(ends["a"], Finished) and sounds["a"].size, ends
    finally:
        engine.close()

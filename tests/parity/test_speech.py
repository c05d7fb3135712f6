"""Every tiny model of transformers that makes sound: through the engine, alone and in company, its sound is that of
transformers' own call, sample for sample.

fp32 on a CPU. Calls are interleaved and not merged, so the same operations run in the same order: no difference at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.generate_engine import GenerateEngine
from polymux.families import all_generate_families
from polymux.request import Failed, Finished, Request, SamplingParams

from .sounding import drive

Speak = Callable[[Path, str, dict[str, Any]], torch.Tensor]

SEED = 5
LINE = "hello there my friend"
OTHERS = ("one two three", "good day", LINE)  # the last one with another seed


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint, the parameters of the request, and the same call in transformers."""

    name: str
    speak: Speak
    params: dict[str, Any] = field(default_factory=dict)


def vits(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, tok = T.VitsModel.from_pretrained(path), T.VitsTokenizer.from_pretrained(path)
    model.noise_scale = params["extra_args"]["noise_scale"]
    torch.manual_seed(SEED)
    return model(**tok(text, return_tensors="pt"), speaker_id=1).waveform[0]


def speecht5(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, tok = T.SpeechT5ForTextToSpeech.from_pretrained(path), T.SpeechT5Tokenizer.from_pretrained(path)
    vocoder = T.SpeechT5HifiGan.from_pretrained(path / "vocoder")
    ids = tok(text, return_tensors="pt").input_ids
    torch.manual_seed(SEED)
    return model.generate_speech(ids, torch.zeros(1, 8), vocoder=vocoder, **params["extra_args"])


def bark(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, processor = T.BarkModel.from_pretrained(path), T.BarkProcessor.from_pretrained(path)
    given = {"semantic_do_sample": True, "coarse_do_sample": True, "temperature": 0.8}
    torch.manual_seed(SEED)
    return model.generate(**processor(text, max_length=32), **given, semantic_max_new_tokens=12)[0]


def csm(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, processor = T.CsmForConditionalGeneration.from_pretrained(path), T.CsmProcessor.from_pretrained(path)
    said = f"<|begin_of_text|>[3]{text}<|end_of_text|>"
    inputs = processor(said, add_special_tokens=False, return_tensors="pt")
    how = {"do_sample": True, "depth_decoder_do_sample": True, "temperature": 0.8, "depth_decoder_temperature": 0.5}
    torch.manual_seed(SEED)
    return model.generate(**inputs, **how, max_new_tokens=6, output_audio=True)[0]


def dia(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, codec = (
        T.DiaForConditionalGeneration.from_pretrained(path),
        T.DacModel.from_pretrained(path / "audio_tokenizer"),
    )
    features, tok = T.DiaFeatureExtractor.from_pretrained(path), T.DiaTokenizer.from_pretrained(path)
    processor = T.DiaProcessor(feature_extractor=features, tokenizer=tok, audio_tokenizer=codec)
    names = dict(eos_token_id=32, pad_token_id=33, bos_token_id=34, delay_pattern=[0, 1, 2, 3])
    inputs = processor(text=[f"[S2] {text}"], padding=True, return_tensors="pt", **names)
    torch.manual_seed(SEED)
    codes = model.generate(**inputs, do_sample=True, guidance_scale=3.0, top_k=16, max_new_tokens=24)
    return processor.batch_decode(codes, **{k: v for k, v in names.items() if k != "eos_token_id"})[0]


def musicgen(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, processor = (
        T.MusicgenForConditionalGeneration.from_pretrained(path),
        T.MusicgenProcessor.from_pretrained(path),
    )
    inputs = processor(text=[text], padding=True, return_tensors="pt")
    torch.manual_seed(SEED)
    return model.generate(**inputs, do_sample=True, top_p=0.9, max_new_tokens=16)[0]


def vibevoice(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, processor = (
        T.VibeVoiceForConditionalGeneration.from_pretrained(path),
        T.VibeVoiceProcessor.from_pretrained(path),
    )
    turn = {"role": "2", "content": [{"type": "text", "text": text}]}
    inputs = processor.apply_chat_template([turn], tokenize=True, return_dict=True, return_tensors="pt")
    torch.manual_seed(SEED)
    return model.generate(**inputs, guidance_scale=2.0, num_diffusion_steps=3, max_new_tokens=6)[0]


def pocket_tts(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, processor = (
        T.PocketTTSForConditionalGeneration.from_pretrained(path),
        T.PocketTTSProcessor.from_pretrained(path),
    )
    processor.audio_tokenizer = T.PocketTTSAudioTokenizerModel.from_pretrained(path / "audio_tokenizer")
    turn = {"role": "user", "content": [{"type": "text", "text": text}]}
    inputs = processor(text=[processor.apply_chat_template([turn], tokenize=False)], return_tensors="pt")
    torch.manual_seed(SEED)
    made = model.generate(**inputs, do_sample=True, temperature=0.5, num_flow_steps=2, max_new_tokens=30)
    return processor.decode(made.audio_latents, made.audio_latents_mask)[0]


def musicgen_melody(path: Path, text: str, params: dict[str, Any]) -> torch.Tensor:
    model, tok = T.MusicgenMelodyForConditionalGeneration.from_pretrained(path), T.AutoTokenizer.from_pretrained(path)
    torch.manual_seed(SEED)
    return model.generate(
        **tok([text], padding=True, return_tensors="pt"), do_sample=True, top_p=0.9, max_new_tokens=16
    )[0]


CASES = (
    Case("vits", vits, {"voice": "1", "extra_args": {"noise_scale": 0.3}}),
    Case("speecht5-tts", speecht5, {"extra_args": {"threshold": 2.0, "maxlenratio": 1.5}}),
    Case("bark", bark, {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}),
    Case("csm", csm, {"voice": "3", "temperature": 0.8, "extra_args": {"depth_decoder_temperature": 0.5},
                      "max_new_tokens": 6}),
    Case("dia", dia, {"voice": "S2", "guidance_scale": 3.0, "top_k": 16, "max_new_tokens": 24}),
    Case("vibevoice", vibevoice, {"voice": "2", "guidance_scale": 2.0, "extra_args": {"num_diffusion_steps": 3},
                                  "max_new_tokens": 6}),
    Case("pocket-tts", pocket_tts, {"temperature": 0.5, "extra_args": {"num_flow_steps": 2}, "max_new_tokens": 30}),
    Case("musicgen", musicgen, {"top_p": 0.9, "max_new_tokens": 16}),
    Case("musicgen-melody", musicgen_melody, {"top_p": 0.9, "max_new_tokens": 16}),
)  # fmt: skip


def test_every_family_is_here() -> None:
    declared = {family.name for family in all_generate_families() if family.modality == "audio"}
    # Their codec is not everywhere, and transformers does not have the other.
    elsewhere = {"higgs-audio-v2", "qwen3-tts"}  # test_higgs.py, test_qwen3_tts.py
    assert {
        case.name.removesuffix("-tts") if case.name == "speecht5-tts" else case.name for case in CASES
    } == declared - elsewhere


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_sound_is_that_of_transformers(case: Case, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(case.name)
    wanted = case.speak(path, LINE, case.params).float().reshape(1, -1).numpy()
    engine = GenerateEngine.load(EngineConfig.from_flat(model=str(path)))

    def add(name: str, text: str, seed: int, **changes: Any) -> None:
        sampling = SamplingParams(**case.params | {"seed": seed} | changes)
        engine.add(Request(request_id=name, prompt=text, sampling=sampling))

    try:
        add("alone", LINE, SEED)
        sounds, ends = drive(engine)
        assert isinstance(ends["alone"], Finished), ends["alone"]
        assert np.array_equal(sounds["alone"], wanted)
        add("again", LINE, SEED)
        for i, text in enumerate(OTHERS):  # these keep the model's own settings
            add(f"other-{i}", text, 6 + i, extra_args={}, **({"max_new_tokens": 9} if "top_p" in case.params else {}))
        sounds, ends = drive(engine)
        assert all(isinstance(ends[f"other-{i}"], (Finished, Failed)) for i in range(3))
        assert np.array_equal(sounds["again"], wanted)
        assert "other-2" not in sounds or not np.array_equal(sounds["other-2"], wanted)
    finally:
        engine.close()
    assert np.array_equal(case.speak(path, LINE, case.params).float().reshape(1, -1).numpy(), wanted)

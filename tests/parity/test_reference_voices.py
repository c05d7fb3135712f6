"""With a recording of a voice, a model's sound is that of transformers' own call with the same recording, sample for
sample, alone and beside requests that have none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.generate_engine import GenerateEngine
from polymux.errors import InvalidRequestError
from polymux.prompts import request_of
from polymux.request import Finished, SamplingParams

from .sounding import Sound, drive

SEED = 5
LINE, SAID = "hello there my friend", "what I said"


def recording(rate: int, samples: int = 900) -> Sound:
    return (0.3 * np.sin(np.arange(samples) * 440 * 2 * np.pi / rate)).astype(np.float32)


def csm(path: Path) -> tuple[Sound, int, dict[str, Any]]:
    model, processor = T.CsmForConditionalGeneration.from_pretrained(path), T.CsmProcessor.from_pretrained(path)
    heard = recording(24000)
    turns = [
        {"role": "3", "content": [{"type": "text", "text": SAID}, {"type": "audio", "audio": heard}]},
        {"role": "3", "content": [{"type": "text", "text": LINE}]},
    ]
    layers = [model.codec_model.encoder.encoder_seanet.get_submodule(name)
              for name in model.codec_model.encoder.encoder_seanet._conv1d_layer_names]  # fmt: skip
    convolutions = [layer.conv for layer in layers] + [model.codec_model.encoder.downsample.conv]
    lengths = {
        "kernel_sizes": [c.kernel_size[0] for c in convolutions],
        "strides": [c.stride[0] for c in convolutions],
        "dilations": [c.dilation[0] for c in convolutions],
        "use_causal_conv": True,
    }
    kwargs = {"encoded_length_kwargs": lengths}
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, processor_kwargs=kwargs)
    torch.manual_seed(SEED)
    made = model.generate(**inputs, do_sample=True, depth_decoder_do_sample=True, max_new_tokens=6, output_audio=True)
    return made[0].reshape(1, -1).numpy(), 24000, {"voice": "3", "do_sample": True, "max_new_tokens": 6}


def dia(path: Path) -> tuple[Sound, int, dict[str, Any]]:
    model = T.DiaForConditionalGeneration.from_pretrained(path)
    codec = T.DacModel.from_pretrained(path / "audio_tokenizer")
    features, tok = T.DiaFeatureExtractor.from_pretrained(path), T.DiaTokenizer.from_pretrained(path)
    processor = T.DiaProcessor(feature_extractor=features, tokenizer=tok, audio_tokenizer=codec)
    names: dict[str, Any] = dict(eos_token_id=32, pad_token_id=33, bos_token_id=34, delay_pattern=[0, 1, 2, 3])
    text = f"[S2] {SAID} [S2] {LINE}"
    heard = recording(44100)
    inputs = processor(text=[text], audio=[heard], padding=True, return_tensors="pt", **names)
    begins = processor.get_audio_prompt_len(inputs["decoder_attention_mask"], **names)
    torch.manual_seed(SEED)
    codes = model.generate(**inputs, do_sample=True, guidance_scale=3.0, top_k=16, max_new_tokens=24)
    del names["eos_token_id"]
    made = processor.batch_decode(codes, begins, **names)[0]
    return made.reshape(1, -1).numpy(), 44100, {"voice": "S2", "guidance_scale": 3.0, "top_k": 16, "max_new_tokens": 24}


def vibevoice(path: Path) -> tuple[Sound, int, dict[str, Any]]:
    model = T.VibeVoiceForConditionalGeneration.from_pretrained(path)
    processor = T.VibeVoiceProcessor.from_pretrained(path)
    content = [{"type": "text", "text": LINE}, {"type": "audio"}]
    text = processor.apply_chat_template([{"role": "3", "content": content}], tokenize=False)
    inputs = processor(text=[text], audio=[recording(24000)], sampling_rate=24000, return_tensors="pt")
    torch.manual_seed(SEED)
    made = model.generate(**inputs, max_new_tokens=5)[0]
    return made.reshape(1, -1).numpy(), 24000, {"voice": "3", "max_new_tokens": 5}


def pocket_tts(path: Path) -> tuple[Sound, int, dict[str, Any]]:
    model = T.PocketTTSForConditionalGeneration.from_pretrained(path)
    processor = T.PocketTTSProcessor.from_pretrained(path)
    processor.audio_tokenizer = T.PocketTTSAudioTokenizerModel.from_pretrained(path / "audio_tokenizer")
    content = [{"type": "audio"}, {"type": "text", "text": LINE}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    inputs = processor(text=[text], audio=[recording(24000)], sampling_rate=24000, return_tensors="pt")
    torch.manual_seed(SEED)
    made = model.generate(**inputs, max_new_tokens=6)
    sound = processor.decode(made.audio_latents, made.audio_latents_mask)[0]
    return sound.reshape(1, -1).numpy(), 24000, {"max_new_tokens": 6}


@pytest.mark.parametrize("case", [csm, dia], ids=lambda case: case.__name__)
@torch.no_grad()
def test_sound_is_that_of_transformers(case: Any, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(case.__name__)
    wanted, rate, params = case(path)
    engine = GenerateEngine.load(EngineConfig.from_flat(model=str(path)))

    def add(name: str, seed: int = SEED, **changes: Any) -> None:
        engine.add(request_of(LINE, SamplingParams(**params | {"seed": seed} | changes), name))

    heard = {"ref_audio": (recording(rate), rate), "ref_text": SAID}
    try:
        add("alone", **heard)
        sounds, ends = drive(engine)
        assert isinstance(ends["alone"], Finished), ends["alone"]
        assert np.array_equal(sounds["alone"], wanted)
        add("again", **heard)
        add("plain")
        add("other", **heard | {"ref_text": "another text"})
        add("stereo", **heard | {"ref_audio": (np.stack([recording(rate)] * 2).astype(np.float64), rate)})
        sounds, ends = drive(engine)
        assert all(isinstance(end, Finished) for end in ends.values()), ends
        assert np.array_equal(sounds["again"], wanted) and np.array_equal(sounds["stereo"], wanted)
        assert not np.array_equal(sounds["plain"], wanted) and not np.array_equal(sounds["other"], wanted)
        add("resampled", **heard | {"ref_audio": (recording(rate // 2, 450), rate // 2)})
        sounds, ends = drive(engine)
        assert isinstance(ends["resampled"], Finished) and sounds["resampled"].size
        for changes, param in (
            ({"ref_audio": heard["ref_audio"]}, "ref_text"),
            ({"ref_text": SAID}, "ref_text"),
            (heard | {"ref_text": " "}, "ref_text"),
            (heard | {"ref_text": "word " * 300}, "ref_audio" if case is csm else "ref_text"),
            (heard | {"ref_audio": (recording(rate, 31 * rate), rate)}, "ref_audio"),
            (heard | {"ref_audio": (recording(rate, rate), rate)}, "ref_audio"),  # longer than these tiny models hear
            (heard | {"ref_audio": (recording(rate) * np.nan, rate)}, "ref_audio"),
            (heard | {"ref_audio": recording(rate)}, "ref_audio"),
            ({"speaker_embedding": (1.0,)}, "speaker_embedding"),
        ):
            with pytest.raises(InvalidRequestError) as error:
                add("refused", **changes)
            assert error.value.param == param, changes
        assert not engine.busy
    finally:
        engine.close()


@pytest.mark.parametrize("case", [vibevoice, pocket_tts], ids=lambda case: case.__name__)
@torch.no_grad()
def test_some_need_not_know_what_is_said(case: Any, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(case.__name__.replace("_", "-"))
    wanted, rate, params = case(path)
    engine = GenerateEngine.load(EngineConfig.from_flat(model=str(path)))

    def add(name: str, **changes: Any) -> None:
        engine.add(request_of(LINE, SamplingParams(**params | {"seed": SEED} | changes), name))

    heard = {"ref_audio": (recording(rate), rate)}
    try:
        add("alone", **heard)
        sounds, ends = drive(engine)
        assert isinstance(ends["alone"], Finished), ends["alone"]
        assert np.array_equal(sounds["alone"], wanted)
        add("again", **heard)
        add("plain")
        add("other", ref_audio=(recording(rate, 500), rate))
        sounds, ends = drive(engine)
        assert all(isinstance(end, Finished) for end in ends.values()), ends
        assert np.array_equal(sounds["again"], wanted)
        assert not np.array_equal(sounds["plain"], wanted) and not np.array_equal(sounds["other"], wanted)
        for changes, param in (
            (heard | {"ref_text": SAID}, "ref_text"),
            ({"ref_text": SAID}, "ref_text"),
            ({"ref_audio": (recording(rate, 31 * rate), rate)}, "ref_audio"),
            ({"temperature": 0.5} if case is vibevoice else {"top_k": 5}, None),
        ):
            with pytest.raises(InvalidRequestError) as error:
                add("refused", **changes)
            assert error.value.param == (param or next(iter(changes))), changes
        assert not engine.busy
    finally:
        engine.close()


@pytest.mark.parametrize("case", [csm, dia, vibevoice, pocket_tts], ids=lambda case: case.__name__)
def test_in_16_bits_too(case: Any, tiny_checkpoint: Callable[..., Path]) -> None:
    """What GPUs have."""
    path = tiny_checkpoint(case.__name__.replace("_", "-"))
    engine = GenerateEngine.load(EngineConfig.from_flat(model=str(path), dtype="bf16"))
    rate = engine.capabilities.sample_rate or 0
    said = SAID if "ref_text" in engine.capabilities.arguments else None
    params = SamplingParams(ref_audio=(recording(rate), rate), ref_text=said, seed=SEED, max_new_tokens=6)
    try:
        engine.add(request_of(LINE, params, "a"))
        sounds, ends = drive(engine)
        assert isinstance(ends["a"], Finished) and sounds["a"].size, ends
    finally:
        engine.close()


@torch.no_grad()
def test_a_vector_is_a_voice(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("speecht5-tts")
    model, tok = T.SpeechT5ForTextToSpeech.from_pretrained(path), T.SpeechT5Tokenizer.from_pretrained(path)
    vocoder = T.SpeechT5HifiGan.from_pretrained(path / "vocoder")
    vector = np.linspace(-1, 1, 8, dtype=np.float32)
    torch.manual_seed(SEED)
    ids = tok(LINE, return_tensors="pt").input_ids
    speak = {"threshold": 2.0, "maxlenratio": 1.5}
    wanted = model.generate_speech(ids, torch.tensor(vector)[None], vocoder=vocoder, **speak).reshape(1, -1).numpy()
    engine = GenerateEngine.load(EngineConfig.from_flat(model=str(path)))
    given = {"seed": SEED, "extra_args": speak}
    try:
        engine.add(request_of(LINE, SamplingParams(**given, speaker_embedding=vector), "a"))  # type: ignore[arg-type]
        engine.add(request_of(LINE, SamplingParams(**given), "b"))
        sounds, _ = drive(engine)
        assert np.array_equal(sounds["a"], wanted) and not np.array_equal(sounds["b"], wanted)
        sound = (recording(16000), 16000)
        for changes, param in (
            ({"speaker_embedding": (1.0,) * 7}, "speaker_embedding"),
            ({"speaker_embedding": (float("nan"),) * 8}, "speaker_embedding"),
            ({"speaker_embedding": (1.0,) * 8, "voice": "default"}, "speaker_embedding"),
            ({"ref_audio": sound, "ref_text": SAID}, "ref_audio"),
            ({"ref_text": SAID}, "ref_text"),
        ):
            with pytest.raises(InvalidRequestError) as error:
                engine.add(request_of(LINE, SamplingParams(**given, **changes), "refused"))
            assert error.value.param == param
        assert "x-vector" in engine.capabilities.refused["ref_audio"]
    finally:
        engine.close()

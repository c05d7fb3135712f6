"""Audio codecs: waveform to tokens and back."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T

from polymux.testing.tiny.inputs import tone
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.weights import filled


def _sound(ctx: Ctx, seconds: float, rate: int) -> torch.Tensor:
    return torch.from_numpy(tone(seconds, rate))[None, None].to(ctx.dtype)  # (1, 1, samples)


def mimi_config(quantizers: int = 4, codebook: int = 32) -> T.MimiConfig:
    return T.MimiConfig(
        hidden_size=32, num_filters=4, upsampling_ratios=[4, 3, 2], codebook_size=codebook, codebook_dim=16,
        num_quantizers=quantizers, vector_quantization_hidden_dimension=16, num_semantic_quantizers=1,
        upsample_groups=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, sliding_window=16, frame_rate=24000 / 24 / 2,
    )


@tiny("mimi", "transformers")
def mimi(ctx: Ctx) -> list[Saveable]:
    features = T.EncodecFeatureExtractor(feature_size=1, sampling_rate=24000)
    return [filled(ctx, T.MimiModel(mimi_config())), features]


@runner("mimi")
@torch.no_grad()
def run_mimi(path: Path, ctx: Ctx) -> Tensors:
    model = T.MimiModel.from_pretrained(path, dtype=ctx.dtype)
    codes = model.encode(_sound(ctx, 0.05, 24000)).audio_codes
    return {"codes": codes, "wav": model.decode(codes).audio_values}


def dac_config(books: int = 3, size: int = 32) -> T.DacConfig:
    return T.DacConfig(
        encoder_hidden_size=8, downsampling_ratios=[2, 4, 4], decoder_hidden_size=32, n_codebooks=books,
        codebook_size=size, codebook_dim=4, sampling_rate=44100,
    )


@tiny("dac", "transformers")
def dac(ctx: Ctx) -> list[Saveable]:
    features = T.DacFeatureExtractor(feature_size=1, sampling_rate=44100, hop_length=32)
    return [filled(ctx, T.DacModel(dac_config())), features]


@runner("dac")
@torch.no_grad()
def run_dac(path: Path, ctx: Ctx) -> Tensors:
    model = T.DacModel.from_pretrained(path, dtype=ctx.dtype)
    codes = model.encode(_sound(ctx, 0.05, 44100)).audio_codes
    return {"codes": codes, "wav": model.decode(audio_codes=codes).audio_values}


def encodec_config(rate: int = 24000) -> T.EncodecConfig:
    return T.EncodecConfig(
        target_bandwidths=[rate / 32 * 5 * 2 / 1000, rate / 32 * 5 * 4 / 1000], sampling_rate=rate, hidden_size=16,
        num_filters=4, upsampling_ratios=[4, 4, 2], codebook_size=32, codebook_dim=16,
    )


@tiny("encodec", "transformers")
def encodec(ctx: Ctx) -> list[Saveable]:
    features = T.EncodecFeatureExtractor(feature_size=1, sampling_rate=24000)
    return [filled(ctx, T.EncodecModel(encodec_config())), features]


@runner("encodec")
@torch.no_grad()
def run_encodec(path: Path, ctx: Ctx) -> Tensors:
    model = T.EncodecModel.from_pretrained(path, dtype=ctx.dtype)
    coded = model.encode(_sound(ctx, 0.05, 24000))
    wav = model.decode(coded.audio_codes, coded.audio_scales).audio_values
    return {"codes": coded.audio_codes, "wav": wav}


@tiny("vibevoice-acoustic", "transformers")
def vibevoice_acoustic(ctx: Ctx) -> list[Saveable]:
    config = T.VibeVoiceAcousticTokenizerConfig(
        hidden_size=8, num_filters=4, downsampling_ratios=[2, 2, 4], depths=[1, 1, 1, 1]
    )
    return [filled(ctx, T.VibeVoiceAcousticTokenizerModel(config))]


@runner("vibevoice-acoustic")
@torch.no_grad()
def run_vibevoice_acoustic(path: Path, ctx: Ctx) -> Tensors:
    model = T.VibeVoiceAcousticTokenizerModel.from_pretrained(path, dtype=ctx.dtype)
    latents = model.encode(_sound(ctx, 0.02, 24000)).latents
    return {"latents": latents, "wav": model.decode(latents).audio}

"""Qwen3-TTS, of its three types: with voices by name, with voices by description, and with the voice of a recording.

Written in the layout of the published checkpoints, with the codec in a folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as T

from polymux.models.qwen3_tts.codec import Qwen3TTSTokenizerV2Model
from polymux.models.qwen3_tts.configs import Qwen3TTSConfig, Qwen3TTSTokenizerV2Config
from polymux.models.qwen3_tts.model import Qwen3TTSForConditionalGeneration
from polymux.testing.tiny.files import Files
from polymux.testing.tiny.makers.codecs import mimi_config
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import qwen_tokenizer, role_tokens, size_of
from polymux.testing.tiny.weights import filled

GROUPS, CODES, SPECIAL = 4, 32, 1024  # the last SPECIAL codes of the talker are no sound
_LAYERS: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "num_hidden_layers": 2, "max_position_embeddings": 2048, "rope_theta": 10000, "attention_bias": False,
}  # fmt: skip


def _talker(tok: T.Qwen2Tokenizer, kind: str) -> dict[str, Any]:
    special = {
        name: CODES + 32 + i
        for i, name in enumerate(("pad", "bos", "eos_token", "think", "nothink", "think_bos", "think_eos"))
    }
    scaling = {"rope_type": "default", "type": "default", "mrope_section": [4, 2, 2], "interleaved": True}
    named = kind == "custom_voice"
    return _LAYERS | {f"codec_{name}_id": number for name, number in special.items()} | {
        "vocab_size": CODES + SPECIAL, "hidden_size": 64, "intermediate_size": 96, "num_code_groups": GROUPS,
        "text_hidden_size": 48, "text_vocab_size": size_of(tok), "rope_scaling": scaling,
        "codec_language_id": {"english": CODES + 50, "chinese": CODES + 51, "wu_dialect": CODES + 52},
        "spk_id": {"anna": CODES + 60, "bert": CODES + 61, "chen": CODES + 62} if named else {},
        "spk_is_dialect": {"anna": False, "bert": False, "chen": "wu_dialect"} if named else {},
        "code_predictor_config": _LAYERS | {
            "vocab_size": CODES, "hidden_size": 32, "intermediate_size": 48, "num_code_groups": GROUPS,
        },
    }  # fmt: skip


def codec_decoder() -> dict[str, Any]:
    return {
        "codebook_size": CODES, "codebook_dim": 16, "latent_dim": 32, "hidden_size": 32, "num_quantizers": GROUPS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
        "num_hidden_layers": 2, "sliding_window": 6, "max_position_embeddings": 512, "rope_theta": 10000,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "layer_scale_initial_scale": 0.01, "attention_bias": False,
        "upsample_rates": [3, 2], "upsampling_ratios": [2, 2], "decoder_dim": 32,
    }  # fmt: skip


def _made(ctx: Ctx, kind: str, size: str = "1b7") -> list[Saveable]:
    tok = role_tokens(qwen_tokenizer(["<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]))
    ids = tok.convert_tokens_to_ids
    speaker = {
        "mel_dim": 128, "enc_dim": 64, "enc_channels": [16, 16, 16, 32], "enc_kernel_sizes": [5, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 1], "enc_attention_channels": 8, "enc_res2net_scale": 4, "enc_se_channels": 8,
        "sample_rate": 24000,
    }  # fmt: skip
    config = Qwen3TTSConfig(
        talker_config=_talker(tok, kind), speaker_encoder_config=speaker, tts_model_type=kind, tts_model_size=size,
        tokenizer_type="qwen3_tts_tokenizer_12hz", tts_pad_token_id=ids("<tts_pad>"),
        tts_bos_token_id=ids("<tts_text_bos>"), tts_eos_token_id=ids("<tts_text_eod>"),
    )
    # A window as long as what is heard here: transformers 4.57, which the package pins, does not look at it.
    encoder = mimi_config(GROUPS + 2, CODES).to_dict() | {"sliding_window": 512}
    codec = filled(ctx, Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(
        decoder_config=codec_decoder(), encoder_config=encoder,
        encoder_valid_num_quantizers=GROUPS, encode_downsample_rate=48, decode_upsample_rate=24,
    )), "codec")
    with torch.no_grad():  # sound that is not cut off at 1, and sentences that do not end at once
        codec.get_parameter(f"decoder.decoder.{len(codec.decoder.decoder) - 1}.conv.weight").mul_(0.05)
        model = filled(ctx, Qwen3TTSForConditionalGeneration(config))
        model.talker.codec_head.weight[model.talker.end].mul_(0.4)
    features = T.EncodecFeatureExtractor(feature_size=1, sampling_rate=24000)
    drawing = {
        "do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05,
        "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0,
        "max_new_tokens": 256,
    }

    def write(path: Path) -> None:
        codec.save_pretrained(path / "speech_tokenizer")
        features.save_pretrained(path / "speech_tokenizer")
        (path / "generation_config.json").write_text(json.dumps(drawing, indent=2))
        named = json.loads((path / "tokenizer_config.json").read_text())
        named["additional_special_tokens"] = named.pop("extra_special_tokens")  # as in published files, which are older
        (path / "tokenizer_config.json").write_text(json.dumps(named, indent=2))

    return [model, tok, Files(write)]


@tiny("qwen3-tts", "transformers")
def qwen3_tts(ctx: Ctx) -> list[Saveable]:
    return _made(ctx, "custom_voice")


@tiny("qwen3-tts-design", "transformers")
def qwen3_tts_design(ctx: Ctx) -> list[Saveable]:
    return _made(ctx, "voice_design")


@tiny("qwen3-tts-base", "transformers")
def qwen3_tts_base(ctx: Ctx) -> list[Saveable]:
    return _made(ctx, "base")


@torch.no_grad()
def _run(path: Path, ctx: Ctx) -> Tensors:
    model = Qwen3TTSForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    codec = Qwen3TTSTokenizerV2Model.from_pretrained(path / "speech_tokenizer", dtype=ctx.dtype)
    ids = T.Qwen2Tokenizer.from_pretrained(path)("<|im_start|>assistant\nhello there").input_ids
    likeliest = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    drawing = {"first": likeliest, "others": likeliest, "most": 8}
    frames = list(model.frames(model.start(codec, {"role": ids[:3], "text": ids[3:]}, {}, drawing)))
    codes = torch.stack(frames, dim=1)
    return {"codes": codes, "wav": codec.decode(codes[None])[0]}


for _name in ("qwen3-tts", "qwen3-tts-design", "qwen3-tts-base"):
    runner(_name)(_run)

"""Qwen2.5-Omni and Qwen3-Omni: text, pictures and sound in, text and speech out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as T

from polymux.testing.tiny.encoders import QWEN_ROPE
from polymux.testing.tiny.files import Files
from polymux.testing.tiny.inputs import have_torchvision, picture, tone
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import CHATML, qwen_tokenizer, role_tokens, size_of
from polymux.testing.tiny.weights import filled, generator

OMNI_NAMES = dict(
    image_token="<|IMAGE|>", audio_token="<|AUDIO|>", video_token="<|VIDEO|>", vision_bos_token="<|vision_bos|>",
    vision_eos_token="<|vision_eos|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
)
OMNI_CHAT = (
    CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_bos|><|IMAGE|><|vision_eos|>")
    .replace("<|vision_start|><|video_pad|><|vision_end|>", "<|vision_bos|><|VIDEO|><|vision_eos|>")
)


def _omni_tokenizer(names: dict[str, str], chat: str, extra: Sequence[str]) -> T.Qwen2Tokenizer:
    tok = qwen_tokenizer([*names.values(), *extra], chat_template=chat, **names)
    return role_tokens(tok)


def _omni_processor(
    cls: type[T.ProcessorMixin], tok: T.Qwen2Tokenizer, chat: str, patch: int
) -> list[Saveable]:
    features = T.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=16000, hop_length=160, chunk_length=30, n_fft=400
    )
    if not have_torchvision():  # without a video processor the composite cannot be built
        return [tok, features]
    side = patch * 2  # two patches on a side become one token
    image = T.Qwen2VLImageProcessor(patch_size=patch, min_pixels=side * side, max_pixels=4 * side * side)
    video = T.Qwen2VLVideoProcessor(patch_size=patch, min_pixels=side * side, max_pixels=4 * side * side)
    return [
        cls(image_processor=image, video_processor=video, feature_extractor=features, tokenizer=tok, chat_template=chat)
    ]


def _token2wav(codes: int) -> dict[str, Any]:
    return dict(
        dit_config=dict(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=2, head_dim=16, emb_dim=16, block_size=24,
            look_ahead_layers=[1], look_backward_layers=[0, 2], num_embeds=codes + 1, mel_dim=20, enc_emb_dim=16,
            enc_dim=16, enc_channels=[16, 16, 16, 16, 48], enc_attention_channels=8, enc_se_channels=8,
            enc_res2net_scale=2,
        ),
        bigvgan_config=dict(
            mel_dim=20, upsample_initial_channel=64, resblock_kernel_sizes=[3, 7],
            resblock_dilation_sizes=[[1, 3, 5]] * 2, upsample_rates=[5, 3, 2, 2, 2, 2],
            upsample_kernel_sizes=[11, 7, 4, 4, 4, 4],
        ),
    )


@tiny("qwen25-omni", "transformers")
def qwen25_omni(ctx: Ctx) -> list[Saveable]:
    tok = _omni_tokenizer(OMNI_NAMES, OMNI_CHAT, ["<tts_pad>", "<tts_text_bos>", "<tts_text_eos>"])
    ids = tok.convert_tokens_to_ids
    hidden, codes = 32, 64
    text = dict(
        vocab_size=size_of(tok), hidden_size=hidden, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, rope_parameters=QWEN_ROPE, max_position_embeddings=4096, tie_word_embeddings=False,
    )
    media = dict(
        audio_token_index=ids("<|AUDIO|>"), image_token_index=ids("<|IMAGE|>"), video_token_index=ids("<|VIDEO|>"),
        audio_start_token_id=ids("<|audio_bos|>"), audio_end_token_id=ids("<|audio_eos|>"),
    )
    config = T.Qwen2_5OmniConfig(
        thinker_config=dict(
            text_config=text, user_token_id=ids("user"), vision_start_token_id=ids("<|vision_bos|>"),
            vision_end_token_id=ids("<|vision_eos|>"), **media,
            audio_config=dict(
                num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=32,
                n_window=50, output_dim=hidden, max_source_positions=100,
            ),
            vision_config=dict(
                depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=14, out_hidden_size=hidden,
                window_size=112, fullatt_block_indexes=[1],
            ),
        ),
        talker_config=dict(
            vocab_size=codes + 8, embedding_size=hidden, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=4096,
            rope_parameters=QWEN_ROPE, tts_text_start_token_id=ids("<tts_text_bos>"),
            tts_text_end_token_id=ids("<tts_text_eos>"), tts_text_pad_token_id=ids("<tts_pad>"),
            tts_codec_pad_token_id=codes, tts_codec_start_token_id=codes + 1, tts_codec_end_token_id=codes + 2,
            tts_codec_mask_token_id=codes + 4, vision_start_token_id=ids("<|vision_bos|>"),
            vision_end_token_id=ids("<|vision_eos|>"), **media,
        ),
        token2wav_config=_token2wav(codes),
    )
    model = filled(ctx, T.Qwen2_5OmniForConditionalGeneration(config))
    model.token2wav.float()
    _never_pick(model.talker, [i for i in range(codes, codes + 8) if i != codes + 2])
    processor = _omni_processor(T.Qwen2_5OmniProcessor, tok, OMNI_CHAT, 14)
    first_tokens = {"Chelsie": ids("<tts_text_bos>"), "Ethan": ids("<tts_pad>")}
    return [model, *processor, Files(lambda path: _speakers(path, ctx, first_tokens))]


@torch.no_grad()
def _never_pick(talker: T.Qwen2_5OmniTalkerForConditionalGeneration, ids: list[int]) -> None:
    """As a trained talker never writes codes that mean no sound. One feature is always on, and speaks against them."""
    talker.thinker_to_talker_proj.bias[0] = 8.0
    talker.codec_head.weight[:, 0] = 0.0
    talker.codec_head.weight[ids] = 0.0
    talker.codec_head.weight[ids, 0] = -50.0


def _speakers(path: Path, ctx: Ctx, first_tokens: dict[str, int]) -> None:
    out = {}
    for who, bos in first_tokens.items():
        g = generator(ctx.seed, f"spk/{who}")
        cond, ref_mel = torch.randn(1, 16, generator=g), torch.randn(1, 30, 20, generator=g)
        out[who] = {"cond": cond, "ref_mel": ref_mel, "bos_token": bos}
    torch.save(out, path / "spk_dict.pt")


def _omni_inputs(
    path: Path, processor_cls: type[T.ProcessorMixin], image: bool = True, audio: bool = True
) -> T.BatchFeature:
    if not have_torchvision():
        tok = T.AutoTokenizer.from_pretrained(path)
        return tok("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    processor = processor_cls.from_pretrained(path)
    content = [{"type": "text", "text": "describe"}]
    extra: dict[str, Any] = {}
    if audio:
        content.insert(0, {"type": "audio"})
        extra["audio"] = [tone(1.0, 16000)]
    if image:
        content.insert(0, {"type": "image"})
        extra["images"] = [picture(56, 56)]
    messages = [{"role": "user", "content": content}]
    chat = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(text=chat, return_tensors="pt", padding=True, **extra)


@runner("qwen25-omni")
def run_qwen25_omni(path: Path, ctx: Ctx) -> Tensors:
    model = T.Qwen2_5OmniForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = dict(_omni_inputs(path, T.Qwen2_5OmniProcessor).to(ctx.dtype))
    if "pixel_values" in inputs:  # without the prefix, 5.24 hands it to the talker too, whose generate() refuses it
        inputs["thinker_pixel_values"] = inputs.pop("pixel_values")
    torch.manual_seed(ctx.seed)
    ids, wav = model.generate(
        **inputs, speaker="Chelsie", thinker_max_new_tokens=6, thinker_do_sample=False, thinker_eos_token_id=None,
        talker_max_new_tokens=12, talker_do_sample=False, talker_eos_token_id=[64, 66], token2wav_num_steps=4,
    )
    return {"ids": ids, "wav": wav}


QWEN3_OMNI_NAMES = dict(
    image_token="<|image_pad|>", audio_token="<|audio_pad|>", video_token="<|video_pad|>",
    vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>", audio_bos_token="<|audio_start|>",
    audio_eos_token="<|audio_end|>",
)
QWEN3_OMNI_CHAT = CHATML.replace("<|audio_bos|><|AUDIO|><|audio_eos|>", "<|audio_start|><|audio_pad|><|audio_end|>")


@tiny("qwen3-omni-moe", "transformers")
def qwen3_omni_moe(ctx: Ctx) -> list[Saveable]:
    tok = _omni_tokenizer(QWEN3_OMNI_NAMES, QWEN3_OMNI_CHAT, ["<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"])
    ids = tok.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1000000.0, "mrope_interleaved": True}
    moe = dict(moe_intermediate_size=16, num_experts_per_tok=2, num_experts=4, decoder_sparse_step=1)
    attn = dict(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=4096,
    )
    media = dict(
        audio_token_id=ids("<|audio_pad|>"), image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        audio_start_token_id=ids("<|audio_start|>"),
    )
    # generate() suppresses the last 1024 talker tokens but the end marker, so the 64 real codes sit before them
    codes = 64
    config = T.Qwen3OmniMoeConfig(
        thinker_config=dict(
            text_config=dict(vocab_size=size_of(tok), num_hidden_layers=3, rope_parameters=rope, **attn, **moe),
            audio_config=dict(
                num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=32,
                n_window=50, output_dim=32, max_source_positions=100, downsample_hidden_size=8,
            ),
            vision_config=dict(
                depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=16, out_hidden_size=32,
                num_position_embeddings=16, deepstack_visual_indexes=[0],
            ),
            user_token_id=ids("user"), vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"), **media,
        ),
        talker_config=dict(
            text_config=dict(
                vocab_size=codes + 1024, num_hidden_layers=2, rope_parameters=rope,
                shared_expert_intermediate_size=16, **attn, **moe,
            ),
            code_predictor_config=dict(vocab_size=codes, num_hidden_layers=2, num_code_groups=4, **attn),
            num_code_groups=4, thinker_hidden_size=32, accept_hidden_layer=1, codec_pad_id=codes,
            codec_bos_id=codes + 1, codec_eos_token_id=codes + 2, codec_nothink_id=codes + 7,
            codec_think_bos_id=codes + 8, codec_think_eos_id=codes + 9,
            speaker_id={"ethan": codes + 20, "chelsie": codes + 21}, vision_start_token_id=ids("<|vision_start|>"),
            spatial_merge_size=2, **media,
        ),
        code2wav_config=dict(
            codebook_size=codes, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, sliding_window=8,
            intermediate_size=64, num_hidden_layers=2, num_quantizers=4, upsample_rates=[4, 3],
            upsampling_ratios=[2, 2], decoder_dim=32,
        ),
        im_start_token_id=ids("<|im_start|>"), im_end_token_id=ids("<|im_end|>"), tts_pad_token_id=ids("<tts_pad>"),
        tts_bos_token_id=ids("<tts_text_bos>"), tts_eos_token_id=ids("<tts_text_eod>"), system_token_id=ids("system"),
        user_token_id=ids("user"), assistant_token_id=ids("assistant"),
    )
    model = filled(ctx, T.Qwen3OmniMoeForConditionalGeneration(config))
    return [model, *_omni_processor(T.Qwen3OmniMoeProcessor, tok, QWEN3_OMNI_CHAT, 16)]


@runner("qwen3-omni-moe")
def run_qwen3_omni_moe(path: Path, ctx: Ctx) -> Tensors:
    model = T.Qwen3OmniMoeForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    kw = dict(thinker_max_new_tokens=6, thinker_do_sample=False, thinker_eos_token_id=None, use_audio_in_video=False)
    # transformers 5.24 cannot speak about an image and a sound in one prompt: the talker's get_rope_index reads
    # config.audio_config, which Qwen3OmniMoeTalkerConfig lacks. Together they give text only; apart, text and audio.
    both = model.generate(**_omni_inputs(path, T.Qwen3OmniMoeProcessor).to(ctx.dtype), return_audio=False, **kw)
    out = {"ids_both": both if torch.is_tensor(both) else both.sequences}
    for name, off in (("image", "audio"), ("audio", "image")):
        torch.manual_seed(ctx.seed)
        inputs = _omni_inputs(path, T.Qwen3OmniMoeProcessor, **{off: False}).to(ctx.dtype)
        out[f"ids_{name}"], out[f"wav_{name}"] = model.generate(
            **inputs, speaker="Ethan", return_audio=True, talker_max_new_tokens=8, talker_do_sample=False, **kw
        )
    return out

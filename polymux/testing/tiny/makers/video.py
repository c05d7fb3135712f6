"""HunyuanVideo, LTX, CogVideoX, Mochi."""

from __future__ import annotations

from typing import Any

import diffusers as D
import transformers as T

from polymux.testing.tiny.encoders import clip_text, qwen25_vl, t5_encoder
from polymux.testing.tiny.inputs import NEG, PROMPT, VIDEO, picture
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match, ltx_scheduler
from polymux.testing.tiny.tokenizers import (
    clip_tokenizer,
    gemma_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    size_of,
    t5_tokenizer,
)
from polymux.testing.tiny.vaes import vae_hunyuan_video
from polymux.testing.tiny.weights import parts


def _hunyuan15_dit(task: str) -> D.HunyuanVideo15Transformer3DModel:
    return D.HunyuanVideo15Transformer3DModel(
        in_channels=2 * 8 + 1, out_channels=8, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=32, text_embed_2_dim=32, image_embed_dim=32,
        rope_axes_dim=(4, 6, 6), target_size=64, task_type=task,
    )


def _hunyuan15_parts(ctx: Ctx, task: str) -> dict[str, Any]:
    tok, byt5 = qwen_tokenizer(), T.ByT5Tokenizer()
    text = qwen25_vl(tok, layers=4).model.language_model
    return parts(
        ctx, text_encoder=text, tokenizer=tok, transformer=_hunyuan15_dit(task),
        vae=D.AutoencoderKLHunyuanVideo15(
            latent_channels=8, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1,
            spatial_compression_ratio=16, temporal_compression_ratio=4,
        ),
        scheduler=flow_match(7.0), text_encoder_2=t5_encoder(byt5), tokenizer_2=byt5,
        guider=D.ClassifierFreeGuidance(guidance_scale=6.0),
    )


@tiny(
    "hunyuan-video15-t2v", prompt=PROMPT + ' with a sign "hi"', negative_prompt=NEG, width=64, height=64,
    num_frames=5,
)
def hunyuan_video15_t2v(ctx: Ctx) -> D.HunyuanVideo15Pipeline:
    return D.HunyuanVideo15Pipeline(**_hunyuan15_parts(ctx, "t2v"))


@tiny("hunyuan-video15-i2v", image=picture(), prompt=PROMPT, negative_prompt=NEG, num_frames=5)
def hunyuan_video15_i2v(ctx: Ctx) -> D.HunyuanVideo15ImageToVideoPipeline:
    vision = T.SiglipVisionModel(T.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=378, patch_size=14
    ))
    return D.HunyuanVideo15ImageToVideoPipeline(
        **_hunyuan15_parts(ctx, "i2v"),
        **parts(ctx, image_encoder=vision),
        feature_extractor=T.SiglipImageProcessor(size={"height": 378, "width": 378}),
    )


@tiny("hunyuan-video-t2v", **VIDEO, guidance_scale=6.0)
def hunyuan_video_t2v(ctx: Ctx) -> D.HunyuanVideoPipeline:
    tok, clip = llama_tokenizer(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]), clip_tokenizer()
    llama = T.LlamaModel(T.LlamaConfig(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
    ))
    return D.HunyuanVideoPipeline(**parts(
        ctx, text_encoder=llama, tokenizer=tok, text_encoder_2=clip_text(clip), tokenizer_2=clip,
        vae=vae_hunyuan_video(), scheduler=flow_match(7.0),
        transformer=D.HunyuanVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=32, pooled_projection_dim=32,
            rope_axes_dim=(4, 6, 6),
        ),
    ))


def _ltx_parts(ctx: Ctx) -> dict[str, Any]:
    tok = t5_tokenizer()
    return parts(
        ctx, scheduler=ltx_scheduler(), text_encoder=t5_encoder(tok), tokenizer=tok,
        vae=D.AutoencoderKLLTXVideo(
            latent_channels=16, block_out_channels=(8, 8, 8, 16), decoder_block_out_channels=(8, 8, 8, 16),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        transformer=D.LTXVideoTransformer3DModel(
            in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            num_layers=2, caption_channels=32,
        ),
    )


@tiny(
    "ltx-video", **VIDEO | {"width": 64, "height": 64, "num_frames": 9}, negative_prompt=NEG, guidance_scale=3.0,
    max_sequence_length=64,
)
def ltx_video(ctx: Ctx) -> D.LTXPipeline:
    return D.LTXPipeline(**_ltx_parts(ctx))


@tiny(
    "ltx-video-i2v", **VIDEO | {"width": 64, "height": 64, "num_frames": 9}, image=picture(), negative_prompt=NEG,
    guidance_scale=3.0, max_sequence_length=64,
)
def ltx_video_i2v(ctx: Ctx) -> D.LTXImageToVideoPipeline:
    return D.LTXImageToVideoPipeline(**_ltx_parts(ctx))


@tiny(
    "ltx2", **VIDEO | {"width": 64, "height": 64, "num_frames": 9}, negative_prompt=NEG, frame_rate=24.0,
    guidance_scale=4.0, spatio_temporal_guidance_blocks=[1], max_sequence_length=128,
)
def ltx2(ctx: Ctx) -> D.LTX2Pipeline:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    tok = gemma_tokenizer(["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
    ids = tok.convert_tokens_to_ids
    gemma = T.Gemma3ForConditionalGeneration(T.Gemma3Config(
        text_config=dict(
            vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, sliding_window=64,
        ),
        vision_config=dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4, boi_token_index=ids("<start_of_image>"), eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
    ))
    return D.LTX2Pipeline(**parts(
        ctx,
        scheduler=ltx_scheduler(),
        vae=D.AutoencoderKLLTX2Video(
            latent_channels=16, block_out_channels=(8, 16, 32, 64), decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1), spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        ),
        # the statistics of the audio latents have base_channels entries: latent_channels * mel_bins / 4
        audio_vae=D.AutoencoderKLLTX2Audio(
            base_channels=16, latent_channels=8, mel_bins=8, num_res_blocks=1, resolution=64,
        ),
        text_encoder=gemma, tokenizer=tok,
        connectors=LTX2TextConnectors(
            caption_channels=32, text_proj_in_factor=3, video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=16, video_connector_num_layers=1,
            video_connector_num_learnable_registers=8, audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=16, audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=8,
        ),
        transformer=D.LTX2VideoTransformer3DModel(
            in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            audio_in_channels=16, audio_out_channels=16, audio_num_attention_heads=2, audio_attention_head_dim=8,
            audio_cross_attention_dim=16, num_layers=2, caption_channels=32,
        ),
        vocoder=LTX2Vocoder(
            in_channels=16, hidden_channels=32, upsample_kernel_sizes=[16, 15, 8, 4, 4],
            upsample_factors=[6, 5, 2, 2, 2], resnet_kernel_sizes=[3, 7], resnet_dilations=[[1, 3], [1, 3]],
        ),
    ))


def _cogvideox_vae() -> D.AutoencoderKLCogVideoX:
    return D.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_height=32,
        sample_width=32,
    )


@tiny("cogvideox", **VIDEO | {"num_frames": 9}, negative_prompt=NEG, guidance_scale=6.0, max_sequence_length=64)
def cogvideox(ctx: Ctx) -> D.CogVideoXPipeline:
    tok = t5_tokenizer()
    return D.CogVideoXPipeline(**parts(
        ctx, tokenizer=tok, text_encoder=t5_encoder(tok), vae=_cogvideox_vae(),
        transformer=D.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=32, num_layers=2, sample_width=4, sample_height=4, sample_frames=9, max_text_seq_length=64,
            use_rotary_positional_embeddings=True,
        ),
        scheduler=D.CogVideoXDDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
            rescale_betas_zero_snr=True, snr_shift_scale=1.0, timestep_spacing="trailing",
        ),
    ))


@tiny("mochi", **VIDEO | {"num_frames": 7}, negative_prompt=NEG, guidance_scale=4.5, max_sequence_length=64)
def mochi(ctx: Ctx) -> D.MochiPipeline:
    tok = t5_tokenizer()
    return D.MochiPipeline(**parts(
        ctx, scheduler=D.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), text_encoder=t5_encoder(tok),
        tokenizer=tok,
        vae=D.AutoencoderKLMochi(
            latent_channels=12, encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
        ),
        transformer=D.MochiTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16, in_channels=12,
            text_embed_dim=32, time_embed_dim=4, max_sequence_length=64,
        ),
    ))

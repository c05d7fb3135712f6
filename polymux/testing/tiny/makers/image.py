"""Image models with one checkpoint or two each."""

from __future__ import annotations

from typing import Any

import diffusers as D
import transformers as T

from polymux.testing.tiny.encoders import (
    MISTRAL_SPECIAL,
    clip_text,
    gemma2,
    mistral3_config,
    qwen2vl_processor,
    qwen3_config,
    qwen3_vl_parts,
    qwen25_vl,
    t5_encoder,
)
from polymux.testing.tiny.inputs import NEG, PROMPT, picture
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match, flux_scheduler, qwen_image_scheduler
from polymux.testing.tiny.tokenizers import (
    clip_tokenizer,
    gemma_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    size_of,
    t5_tokenizer,
)
from polymux.testing.tiny.vaes import vae_flux2, vae_kl, vae_qwen, vae_wan22_ti2v
from polymux.testing.tiny.weights import parts


@tiny("z-image", prompt=PROMPT, negative_prompt=NEG, guidance_scale=4.0, width=64, height=64)
def z_image(ctx: Ctx) -> D.ZImagePipeline:
    tok = qwen_tokenizer()
    return D.ZImagePipeline(**parts(
        ctx, scheduler=flow_match(6.0), vae=vae_kl(), text_encoder=T.Qwen3Model(qwen3_config(tok, layers=3)),
        tokenizer=tok,
        transformer=D.ZImageTransformer2DModel(
            in_channels=16, dim=48, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
            axes_dims=[8, 8, 8], axes_lens=[1024, 512, 512],
        ),
    ))


@tiny("hunyuan-image21", prompt=PROMPT + ' with a sign "hi"', negative_prompt=NEG, width=64, height=64)
def hunyuan_image21(ctx: Ctx) -> D.HunyuanImagePipeline:
    tok, byt5 = qwen_tokenizer(), T.ByT5Tokenizer()
    return D.HunyuanImagePipeline(**parts(
        ctx, scheduler=flow_match(5.0),
        vae=D.AutoencoderKLHunyuanImage(
            in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(32,) * 6,  # group norm of 32 is fixed
            layers_per_block=1, spatial_compression_ratio=32, sample_size=64, scaling_factor=0.75289,
        ),
        text_encoder=qwen25_vl(tok, layers=4), tokenizer=tok, text_encoder_2=t5_encoder(byt5), tokenizer_2=byt5,
        transformer=D.HunyuanImageTransformer2DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=32, text_embed_2_dim=32, rope_axes_dim=(8, 8),
        ),
        guider=D.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1, enabled=False),
        ocr_guider=D.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
    ))


@tiny("ovis-image", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64, max_sequence_length=64)
def ovis_image(ctx: Ctx) -> D.OvisImagePipeline:
    tok = qwen_tokenizer()
    return D.OvisImagePipeline(**parts(
        ctx, scheduler=flux_scheduler(), vae=vae_kl(), tokenizer=tok,
        text_encoder=T.Qwen3Model(qwen3_config(tok)),
        transformer=D.OvisImageTransformer2DModel(
            in_channels=64, out_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
        ),
    ))


def _longcat_parts(ctx: Ctx) -> dict[str, Any]:
    tok = qwen_tokenizer()
    return parts(
        ctx, scheduler=flux_scheduler(), vae=vae_kl(), text_encoder=qwen25_vl(tok),
        tokenizer=tok, text_processor=qwen2vl_processor(tok),
        transformer=D.LongCatImageTransformer2DModel(
            in_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 6, 6],
        ),
    )


@tiny(
    "longcat-image", needs_torchvision=True, prompt=PROMPT + ' with "hi"', negative_prompt=NEG, guidance_scale=4.0,
    width=64, height=64, enable_prompt_rewrite=False,
)
def longcat_image(ctx: Ctx) -> D.LongCatImagePipeline:
    return D.LongCatImagePipeline(**_longcat_parts(ctx))


@tiny(
    "longcat-image-edit", needs_torchvision=True, image=picture(), prompt=PROMPT, negative_prompt=NEG,
    guidance_scale=4.0,
)
def longcat_image_edit(ctx: Ctx) -> D.LongCatImageEditPipeline:
    return D.LongCatImageEditPipeline(**_longcat_parts(ctx))


@tiny("ernie-image", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64)
def ernie_image(ctx: Ctx) -> D.ErnieImagePipeline:
    tok = llama_tokenizer(MISTRAL_SPECIAL)
    return D.ErnieImagePipeline(**parts(
        ctx, scheduler=flow_match(3.0), vae=vae_flux2(), tokenizer=tok,
        text_encoder=T.Mistral3Model(mistral3_config(tok, 3)), pe=None, pe_tokenizer=None,
        transformer=D.ErnieImageTransformer2DModel(
            hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=64, in_channels=128, out_channels=128,
            text_in_dim=32, rope_axes_dim=(4, 6, 6),
        ),
    ))


@tiny("hidream-i1", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64, max_sequence_length=64)
def hidream_i1(ctx: Ctx) -> D.HiDreamImagePipeline:
    clip, t5, tok = clip_tokenizer(), t5_tokenizer(), llama_tokenizer()
    llama = T.LlamaForCausalLM(T.LlamaConfig(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, output_hidden_states=True,
    ))
    return D.HiDreamImagePipeline(**parts(
        ctx, scheduler=flow_match(3.0), vae=vae_kl(), text_encoder=clip_text(clip, with_projection=True),
        tokenizer=clip, text_encoder_2=clip_text(clip, with_projection=True, act="gelu"),
        tokenizer_2=clip_tokenizer(), text_encoder_3=t5_encoder(t5), tokenizer_3=t5, text_encoder_4=llama,
        tokenizer_4=tok,
        transformer=D.HiDreamImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, caption_channels=[32, 32], text_emb_dim=64, num_routed_experts=4,
            num_activated_experts=2, axes_dims_rope=(4, 6, 6), max_resolution=(16, 16), llama_layers=[0, 1],
        ),
    ))


@tiny("omnigen", prompt=PROMPT, guidance_scale=2.5, width=64, height=64)
def omnigen(ctx: Ctx) -> D.OmniGenPipeline:
    tok = llama_tokenizer(["<|user|>", "<|assistant|>", "<|end|>", "<|diffusion|>"])
    return D.OmniGenPipeline(**parts(
        ctx, scheduler=D.FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1),
        vae=vae_kl(4, quant=True, scaling=0.13025, shift=None), tokenizer=tok,
        transformer=D.OmniGenTransformer2DModel(
            in_channels=4, patch_size=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=64, num_layers=2, pad_token_id=tok.pad_token_id, vocab_size=size_of(tok),
            max_position_embeddings=2048, original_max_position_embeddings=512, pos_embed_max_size=16, time_step_dim=32,
            rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        ),
    ))


@tiny("bria", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64, max_sequence_length=64)
def bria(ctx: Ctx) -> D.BriaPipeline:
    tok = t5_tokenizer()
    return D.BriaPipeline(**parts(
        ctx, scheduler=flux_scheduler(), vae=vae_kl(4, shift=0.0),
        text_encoder=t5_encoder(tok), tokenizer=tok,
        transformer=D.BriaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=[0, 8, 8],
        ),
    ))


@tiny(
    "bria-fibo", prompt='{"scene": "a cat on a red chair"}', negative_prompt=NEG, guidance_scale=5.0, width=64,
    height=64,
)
def bria_fibo(ctx: Ctx) -> D.BriaFiboPipeline:
    tok = qwen_tokenizer()
    lm = T.SmolLM3ForCausalLM(T.SmolLM3Config(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ))
    return D.BriaFiboPipeline(**parts(
        ctx, scheduler=flow_match(3.0, True), vae=vae_wan22_ti2v(), text_encoder=lm, tokenizer=tok,
        transformer=D.BriaFiboTransformer2DModel(
            in_channels=48, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=64, text_encoder_dim=32, axes_dims_rope=[4, 6, 6],
        ),
    ))


@tiny("chroma", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64, max_sequence_length=64)
def chroma(ctx: Ctx) -> D.ChromaPipeline:
    tok = t5_tokenizer()
    return D.ChromaPipeline(**parts(
        ctx, scheduler=flow_match(1.0), vae=vae_kl(), text_encoder=t5_encoder(tok), tokenizer=tok,
        transformer=D.ChromaTransformer2DModel(
            in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=(4, 6, 6), approximator_num_channels=8, approximator_hidden_dim=32,
            approximator_layers=1,
        ),
    ))


@tiny("cogview4", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64, max_sequence_length=64)
def cogview4(ctx: Ctx) -> D.CogView4Pipeline:
    tok = qwen_tokenizer(padding_side="left")
    glm = T.GlmModel(T.GlmConfig(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, pad_token_id=tok.pad_token_id,
    ))
    return D.CogView4Pipeline(**parts(
        ctx, tokenizer=tok, text_encoder=glm, vae=vae_kl(),
        transformer=D.CogView4Transformer2DModel(
            in_channels=16, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            text_embed_dim=32, time_embed_dim=16, condition_dim=8, pos_embed_max_size=32, sample_size=16,
            rope_axes_dim=(16, 16),
        ),
        scheduler=flow_match(
            1.0, True, base_shift=0.25, max_shift=0.75, base_image_seq_len=256, max_image_seq_len=4096,
            time_shift_type="linear",
        ),
    ))


@tiny(
    "sana", prompt=PROMPT, negative_prompt=NEG, guidance_scale=4.5, width=64, height=64, max_sequence_length=64,
    complex_human_instruction=None, use_resolution_binning=False,
)
def sana(ctx: Ctx) -> D.SanaPipeline:
    tok = gemma_tokenizer()
    return D.SanaPipeline(**parts(
        ctx, tokenizer=tok, text_encoder=gemma2(tok),
        vae=D.AutoencoderDC(
            latent_channels=8, attention_head_dim=4,
            encoder_block_types=(
                "ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock", "EfficientViTBlock",
            ),
            decoder_block_types=(
                "ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock", "EfficientViTBlock",
            ),
            encoder_block_out_channels=(8,) * 6, decoder_block_out_channels=(8,) * 6,
            encoder_layers_per_block=(1,) * 6, decoder_layers_per_block=(1,) * 6, upsample_block_type="interpolate",
            downsample_block_type="conv", scaling_factor=0.41407,
        ),
        transformer=D.SanaTransformer2DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
            sample_size=8,
        ),
        scheduler=D.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
        ),
    ))


@tiny("lumina2", prompt=PROMPT, negative_prompt=NEG, guidance_scale=4.0, width=64, height=64, max_sequence_length=64)
def lumina2(ctx: Ctx) -> D.Lumina2Pipeline:
    tok = gemma_tokenizer()
    return D.Lumina2Pipeline(**parts(
        ctx, scheduler=flow_match(6.0), vae=vae_kl(), text_encoder=gemma2(tok), tokenizer=tok,
        transformer=D.Lumina2Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=16, hidden_size=32, num_layers=2, num_refiner_layers=1,
            num_attention_heads=2, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 6, 6), axes_lens=(300, 64, 64),
            cap_feat_dim=32,
        ),
    ))


@tiny(
    "pixart-sigma", prompt=PROMPT, negative_prompt=NEG, guidance_scale=4.5, width=64, height=64,
    max_sequence_length=64, use_resolution_binning=False, clean_caption=False,
)
def pixart_sigma(ctx: Ctx) -> D.PixArtSigmaPipeline:
    tok = t5_tokenizer()
    return D.PixArtSigmaPipeline(**parts(
        ctx, tokenizer=tok, text_encoder=t5_encoder(tok), vae=vae_kl(4, quant=True, scaling=0.13025, shift=None),
        transformer=D.PixArtTransformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
            cross_attention_dim=32, sample_size=8, caption_channels=32,
        ),
        scheduler=D.DPMSolverMultistepScheduler(),
    ))


@tiny("nucleus-moe-image", needs_torchvision=True, prompt=PROMPT, negative_prompt=NEG, width=64, height=64)
def nucleus_moe_image(ctx: Ctx) -> D.NucleusMoEImagePipeline:
    _, lm, processor = qwen3_vl_parts(layers=8)
    return D.NucleusMoEImagePipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), vae=vae_qwen(), text_encoder=lm, processor=processor,
        transformer=D.NucleusMoEImageTransformer2DModel(
            patch_size=2, in_channels=64, out_channels=16, num_layers=5, attention_head_dim=16, num_attention_heads=2,
            num_key_value_heads=1, joint_attention_dim=32, axes_dims_rope=(4, 6, 6), num_experts=4,
            moe_intermediate_dim=32, capacity_factors=[2.0] * 5,
        ),
    ))


@tiny("krea2", prompt=PROMPT, width=64, height=64)
def krea2(ctx: Ctx) -> D.Krea2Pipeline:
    tok, lm, _ = qwen3_vl_parts(layers=4)
    return D.Krea2Pipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), vae=vae_qwen(), text_encoder=lm.model, tokenizer=tok,
        transformer=D.Krea2Transformer2DModel(
            in_channels=64, num_layers=2, attention_head_dim=16, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=64, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=2,
            text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=64,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
        ),
    ), text_encoder_select_layers=(1, 3))


@tiny("kandinsky5-t2i", needs_torchvision=True, prompt=PROMPT, negative_prompt=NEG, width=1024, height=1024)
def kandinsky5_t2i(ctx: Ctx) -> D.Kandinsky5T2IPipeline:
    tok, clip = qwen_tokenizer(), clip_tokenizer()
    return D.Kandinsky5T2IPipeline(**parts(
        ctx, scheduler=flow_match(5.0), vae=vae_kl(), text_encoder=qwen25_vl(tok), tokenizer=qwen2vl_processor(tok),
        text_encoder_2=clip_text(clip), tokenizer_2=clip,
        transformer=D.Kandinsky5Transformer3DModel(
            in_visual_dim=16, in_text_dim=32, in_text_dim2=32, time_dim=16, out_visual_dim=16, model_dim=16, ff_dim=32,
            num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 6, 6),
        ),
    ))


@tiny("auraflow", prompt=PROMPT, negative_prompt=NEG, guidance_scale=3.5, width=64, height=64, max_sequence_length=64)
def auraflow(ctx: Ctx) -> D.AuraFlowPipeline:
    tok = t5_tokenizer()
    return D.AuraFlowPipeline(**parts(
        ctx, scheduler=flow_match(1.73), vae=vae_kl(4, quant=True, scaling=0.13025, shift=None), tokenizer=tok,
        text_encoder=t5_encoder(tok, umt5=True),
        transformer=D.AuraFlowTransformer2DModel(
            sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=2,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32,
            pos_embed_max_size=64,
        ),
    ))

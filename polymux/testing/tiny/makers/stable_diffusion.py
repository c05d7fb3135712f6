"""Stable Diffusion 1.5, XL and 3."""

from __future__ import annotations

from typing import Any

import diffusers as D

from polymux.testing.tiny.encoders import clip_text, t5_encoder
from polymux.testing.tiny.inputs import NEG, PROMPT, picture
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match
from polymux.testing.tiny.tokenizers import clip_tokenizer, t5_tokenizer
from polymux.testing.tiny.vaes import vae_kl
from polymux.testing.tiny.weights import parts


@tiny("sd3", prompt=PROMPT, negative_prompt=NEG, guidance_scale=7.0, width=64, height=64, max_sequence_length=64)
def sd3(ctx: Ctx) -> D.StableDiffusion3Pipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return D.StableDiffusion3Pipeline(**parts(
        ctx, scheduler=flow_match(3.0), vae=vae_kl(scaling=1.5305, shift=0.0609),
        text_encoder=clip_text(clip, with_projection=True), tokenizer=clip,
        text_encoder_2=clip_text(clip, with_projection=True, act="gelu"), tokenizer_2=clip_tokenizer("!"),
        text_encoder_3=t5_encoder(t5, hidden=64), tokenizer_3=t5,
        transformer=D.SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=16, out_channels=16, num_layers=3, attention_head_dim=16,
            num_attention_heads=2, caption_projection_dim=32, joint_attention_dim=64, pooled_projection_dim=64,
            pos_embed_max_size=32, dual_attention_layers=(0,), qk_norm="rms_norm",
        ),
    ))


def _unet(cross: int, xl: bool, channels: int = 4) -> D.UNet2DConditionModel:
    kw = dict(
        sample_size=16, in_channels=channels, out_channels=4, layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=cross,
    )
    if xl:
        return D.UNet2DConditionModel(
            block_out_channels=(16, 32, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 2, 2),
            transformer_layers_per_block=(1, 1, 2), use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 32, **kw,
        )
    return D.UNet2DConditionModel(
        block_out_channels=(16, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=2, **kw,
    )


def _sd15_parts(ctx: Ctx, channels: int = 4) -> dict[str, Any]:
    clip = clip_tokenizer()
    return parts(
        ctx, vae=vae_kl(4, quant=True, scaling=0.18215, shift=None), text_encoder=clip_text(clip), tokenizer=clip,
        unet=_unet(32, False, channels),
        scheduler=D.PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        safety_checker=None, feature_extractor=None,
    )


@tiny("sd15", prompt=PROMPT, negative_prompt=NEG, guidance_scale=7.5, width=64, height=64)
def sd15(ctx: Ctx) -> D.StableDiffusionPipeline:
    return D.StableDiffusionPipeline(**_sd15_parts(ctx), requires_safety_checker=False)


# strength 0.8 of four steps leaves three
@tiny(
    "sd15-img2img", image=picture(), prompt=PROMPT, negative_prompt=NEG, guidance_scale=7.5, strength=0.8,
    num_inference_steps=4,
)
def sd15_img2img(ctx: Ctx) -> D.StableDiffusionImg2ImgPipeline:
    return D.StableDiffusionImg2ImgPipeline(**_sd15_parts(ctx), requires_safety_checker=False)


@tiny(
    "sd15-inpaint", image=picture(), mask_image=picture(seed=9).convert("L"), prompt=PROMPT, negative_prompt=NEG,
    guidance_scale=7.5, width=64, height=64,
)
def sd15_inpaint(ctx: Ctx) -> D.StableDiffusionInpaintPipeline:
    return D.StableDiffusionInpaintPipeline(**_sd15_parts(ctx, channels=9), requires_safety_checker=False)


def _sdxl_parts(ctx: Ctx) -> dict[str, Any]:
    clip = clip_tokenizer()
    return parts(
        ctx, vae=vae_kl(4, quant=True, scaling=0.13025, shift=None), text_encoder=clip_text(clip), tokenizer=clip,
        text_encoder_2=clip_text(clip, with_projection=True, act="gelu"), tokenizer_2=clip_tokenizer("!"),
        unet=_unet(64, True),
        scheduler=D.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
            timestep_spacing="leading",
        ),
    )


@tiny("sdxl", prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, width=64, height=64)
def sdxl(ctx: Ctx) -> D.StableDiffusionXLPipeline:
    return D.StableDiffusionXLPipeline(**_sdxl_parts(ctx))


@tiny(
    "sdxl-img2img", image=picture(), prompt=PROMPT, negative_prompt=NEG, guidance_scale=5.0, strength=0.8,
    num_inference_steps=4,
)
def sdxl_img2img(ctx: Ctx) -> D.StableDiffusionXLImg2ImgPipeline:
    return D.StableDiffusionXLImg2ImgPipeline(**_sdxl_parts(ctx))

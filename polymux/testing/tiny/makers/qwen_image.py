"""Qwen-Image and its variants."""

from __future__ import annotations

from typing import Any

import diffusers as D

from polymux.testing.tiny.encoders import qwen2vl_processor, qwen3_vl_parts, qwen25_vl
from polymux.testing.tiny.inputs import NEG, PROMPT, picture
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import qwen_image_scheduler
from polymux.testing.tiny.tokenizers import qwen_tokenizer
from polymux.testing.tiny.vaes import vae_qwen
from polymux.testing.tiny.weights import parts


def _qwen_image_dit(**kw: Any) -> D.QwenImageTransformer2DModel:
    base = dict(
        patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    )
    return D.QwenImageTransformer2DModel(**{**base, **kw})


@tiny("qwen-image", prompt=PROMPT, negative_prompt=NEG, true_cfg_scale=4.0, width=64, height=64)
def qwen_image(ctx: Ctx) -> D.QwenImagePipeline:
    tok = qwen_tokenizer()
    return D.QwenImagePipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), vae=vae_qwen(), text_encoder=qwen25_vl(tok), tokenizer=tok,
        transformer=_qwen_image_dit(),
    ))


@tiny(
    "qwen-image-edit", needs_torchvision=True, image=picture(), prompt=PROMPT, negative_prompt=NEG,
    true_cfg_scale=4.0, width=64, height=64,
)
def qwen_image_edit(ctx: Ctx) -> D.QwenImageEditPipeline:
    tok = qwen_tokenizer()
    return D.QwenImageEditPipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), vae=vae_qwen(), text_encoder=qwen25_vl(tok), tokenizer=tok,
        processor=qwen2vl_processor(tok), transformer=_qwen_image_dit(),
    ))


@tiny(
    "qwen-image-edit-plus", needs_torchvision=True, image=[picture(), picture(96, 64, 8)], prompt=PROMPT,
    negative_prompt=NEG, true_cfg_scale=4.0, width=64, height=64,
)
def qwen_image_edit_plus(ctx: Ctx) -> D.QwenImageEditPlusPipeline:
    tok = qwen_tokenizer()
    return D.QwenImageEditPlusPipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), vae=vae_qwen(), text_encoder=qwen25_vl(tok), tokenizer=tok,
        processor=qwen2vl_processor(tok), transformer=_qwen_image_dit(zero_cond_t=True),
    ))


@tiny(
    "qwen-image-layered", needs_torchvision=True, image=picture().convert("RGBA"), prompt=PROMPT, negative_prompt=NEG,
    true_cfg_scale=4.0, layers=2, resolution=640,
)
def qwen_image_layered(ctx: Ctx) -> D.QwenImageLayeredPipeline:
    tok = qwen_tokenizer()
    return D.QwenImageLayeredPipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), vae=vae_qwen(input_channels=4), text_encoder=qwen25_vl(tok),
        tokenizer=tok, processor=qwen2vl_processor(tok),
        transformer=_qwen_image_dit(use_additional_t_cond=True, use_layer3d_rope=True),
    ))


@tiny(
    "qwen-image-21", needs_torchvision=True, prompt=PROMPT, negative_prompt=NEG, true_cfg_scale=4.0, width=64,
    height=64,
)
def qwen_image_21(ctx: Ctx) -> D.QwenImage21Pipeline:
    _, lm, processor = qwen3_vl_parts(layers=4)
    return D.QwenImage21Pipeline(**parts(
        ctx, scheduler=qwen_image_scheduler(), text_encoder=lm, processor=processor,
        vae=D.AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=64, dim_mult=[1, 2, 2, 2, 2], num_res_blocks=1,
        ),
        transformer=D.QwenImage21Transformer2DModel(
            in_channels=64, out_channels=64, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            context_in_dim=32, axes_dims_rope=(4, 6, 6),
        ),
    ))

"""Wan 2.1 and 2.2, SkyReels: the Wan denoiser in all its tasks."""

from __future__ import annotations

from typing import Any

import diffusers as D

from polymux.testing.tiny.encoders import clip_image_processor, clip_vision, t5_encoder
from polymux.testing.tiny.inputs import NEG, VIDEO, picture
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import wan_scheduler
from polymux.testing.tiny.tokenizers import t5_tokenizer
from polymux.testing.tiny.vaes import vae_wan, vae_wan22_ti2v
from polymux.testing.tiny.weights import parts


def _wan_dit(**kw: Any) -> dict[str, Any]:
    base = dict(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )
    return base | kw


def _wan_text() -> dict[str, Any]:
    tok = t5_tokenizer()
    return dict(tokenizer=tok, text_encoder=t5_encoder(tok, umt5=True))


@tiny("wan21-t2v", **VIDEO, negative_prompt=NEG, guidance_scale=5.0, max_sequence_length=64)
def wan21_t2v(ctx: Ctx) -> D.WanPipeline:
    return D.WanPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan(), scheduler=wan_scheduler(), transformer=D.WanTransformer3DModel(**_wan_dit())
    ))


# with flow_shift 12 and two steps both steps lie above the boundary; four steps use both experts
@tiny(
    "wan22-t2v-moe", **VIDEO, num_inference_steps=4, negative_prompt=NEG, guidance_scale=4.0, guidance_scale_2=3.0,
    max_sequence_length=64,
)
def wan22_t2v_moe(ctx: Ctx) -> D.WanPipeline:
    return D.WanPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan(), scheduler=wan_scheduler(12.0),
        transformer=D.WanTransformer3DModel(**_wan_dit()), transformer_2=D.WanTransformer3DModel(**_wan_dit()),
    ), boundary_ratio=0.875)


@tiny("wan22-ti2v", **VIDEO, negative_prompt=NEG, guidance_scale=5.0, max_sequence_length=64)
def wan22_ti2v(ctx: Ctx) -> D.WanPipeline:
    return D.WanPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan22_ti2v(), scheduler=wan_scheduler(5.0),
        transformer=D.WanTransformer3DModel(**_wan_dit(in_channels=48, out_channels=48)), transformer_2=None,
    ), expand_timesteps=True)


@tiny("wan22-ti2v-i2v", **VIDEO, image=picture(32, 32), negative_prompt=NEG, guidance_scale=5.0, max_sequence_length=64)
def wan22_ti2v_i2v(ctx: Ctx) -> D.WanImageToVideoPipeline:
    return D.WanImageToVideoPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan22_ti2v(), scheduler=wan_scheduler(5.0),
        transformer=D.WanTransformer3DModel(**_wan_dit(in_channels=48, out_channels=48)), transformer_2=None,
        image_encoder=None, image_processor=None,
    ), expand_timesteps=True)


@tiny("wan21-i2v", **VIDEO, image=picture(32, 32), negative_prompt=NEG, guidance_scale=5.0, max_sequence_length=64)
def wan21_i2v(ctx: Ctx) -> D.WanImageToVideoPipeline:
    return D.WanImageToVideoPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan(), scheduler=wan_scheduler(3.0), image_encoder=clip_vision(),
        image_processor=clip_image_processor(),
        transformer=D.WanTransformer3DModel(**_wan_dit(in_channels=36, image_dim=32, added_kv_proj_dim=32)),
    ))


@tiny(
    "wan22-i2v-moe", **VIDEO, num_inference_steps=4, image=picture(32, 32), negative_prompt=NEG, guidance_scale=3.5,
    max_sequence_length=64,
)
def wan22_i2v_moe(ctx: Ctx) -> D.WanImageToVideoPipeline:
    return D.WanImageToVideoPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan(), scheduler=wan_scheduler(5.0), image_encoder=None, image_processor=None,
        transformer=D.WanTransformer3DModel(**_wan_dit(in_channels=36)),
        transformer_2=D.WanTransformer3DModel(**_wan_dit(in_channels=36)),
    ), boundary_ratio=0.9)


@tiny(
    "wan21-vace", **VIDEO, reference_images=[picture(32, 32)], negative_prompt=NEG, guidance_scale=5.0,
    max_sequence_length=64,
)
def wan21_vace(ctx: Ctx) -> D.WanVACEPipeline:
    return D.WanVACEPipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan(), scheduler=wan_scheduler(3.0),
        transformer=D.WanVACETransformer3DModel(**_wan_dit(num_layers=3), vace_layers=[0, 2], vace_in_channels=96),
    ))


@tiny("skyreels-v2-t2v", **VIDEO, negative_prompt=NEG, guidance_scale=6.0, max_sequence_length=64)
def skyreels_v2_t2v(ctx: Ctx) -> D.SkyReelsV2Pipeline:
    return D.SkyReelsV2Pipeline(**parts(
        ctx, **_wan_text(), vae=vae_wan(), scheduler=wan_scheduler(8.0),
        transformer=D.SkyReelsV2Transformer3DModel(**_wan_dit()),
    ))

"""FLUX.1, Flux Kontext and Fill, FLUX.2."""

from __future__ import annotations

from typing import Any

import diffusers as D
import transformers as T

from polymux.testing.tiny.encoders import (
    MISTRAL_CHAT,
    MISTRAL_SPECIAL,
    clip_text,
    mistral3_config,
    qwen3_config,
    t5_encoder,
)
from polymux.testing.tiny.inputs import PROMPT, picture
from polymux.testing.tiny.registry import TINY, Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match, flux_scheduler
from polymux.testing.tiny.tokenizers import clip_tokenizer, llama_tokenizer, qwen_tokenizer, t5_tokenizer
from polymux.testing.tiny.vaes import vae_flux2, vae_kl
from polymux.testing.tiny.weights import parts


def _flux_dit(**kw: Any) -> D.FluxTransformer2DModel:
    base = dict(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )
    return D.FluxTransformer2DModel(**{**base, **kw})


def _flux_parts(ctx: Ctx, **dit: Any) -> dict[str, Any]:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return parts(
        ctx, scheduler=flux_scheduler(), vae=vae_kl(),
        text_encoder=clip_text(clip), tokenizer=clip, text_encoder_2=t5_encoder(t5), tokenizer_2=t5,
        transformer=_flux_dit(**dit),
    )


@tiny("flux-dev", prompt=PROMPT, guidance_scale=3.5, width=64, height=64, max_sequence_length=64)
def flux_dev(ctx: Ctx) -> D.FluxPipeline:
    return D.FluxPipeline(**_flux_parts(ctx))


@tiny("flux-schnell", prompt=PROMPT, guidance_scale=0.0, width=64, height=64, max_sequence_length=64)
def flux_schnell(ctx: Ctx) -> D.FluxPipeline:
    return D.FluxPipeline(**{**_flux_parts(ctx, guidance_embeds=False), "scheduler": flow_match(1.0, False)})


@tiny(
    "flux-kontext", image=picture(), prompt=PROMPT, guidance_scale=2.5, width=64, height=64, max_sequence_length=64,
    max_area=64 * 64, _auto_resize=False,
)
def flux_kontext(ctx: Ctx) -> D.FluxKontextPipeline:
    return D.FluxKontextPipeline(**_flux_parts(ctx))


@tiny(
    "flux-fill", image=picture(), mask_image=picture(seed=9).convert("L"), prompt=PROMPT, guidance_scale=30.0,
    width=64, height=64, max_sequence_length=64,
)
def flux_fill(ctx: Ctx) -> D.FluxFillPipeline:
    return D.FluxFillPipeline(**_flux_parts(ctx, in_channels=384, out_channels=64))


def _flux2_dit(text_dim: int, guidance: bool) -> D.Flux2Transformer2DModel:
    return D.Flux2Transformer2DModel(
        in_channels=128, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=text_dim, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance,
        timestep_guidance_channels=32,
    )


@tiny(
    "flux2-dev", needs_torchvision=True, prompt=PROMPT, guidance_scale=4.0, width=64, height=64,
    max_sequence_length=64,
)
def flux2_dev(ctx: Ctx) -> D.Flux2Pipeline:
    tok = llama_tokenizer(MISTRAL_SPECIAL)
    processor = T.PixtralProcessor(
        image_processor=T.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14), tokenizer=tok,
        patch_size=14, spatial_merge_size=2, chat_template=MISTRAL_CHAT, image_token="[IMG]",
        image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
    )
    # the pipeline reads hidden states 10, 20 and 30, so the encoder keeps 31 (very thin) layers
    return D.Flux2Pipeline(**parts(
        ctx, scheduler=flow_match(3.0, True), vae=vae_flux2(),
        text_encoder=T.Mistral3ForConditionalGeneration(mistral3_config(tok, 31)), tokenizer=processor,
        transformer=_flux2_dit(3 * 32, True),
    ))


@tiny("flux2-klein", prompt=PROMPT, guidance_scale=4.0, width=64, height=64, max_sequence_length=64)
def flux2_klein(ctx: Ctx) -> D.Flux2KleinPipeline:
    tok = qwen_tokenizer()
    return D.Flux2KleinPipeline(**parts(
        ctx, scheduler=flow_match(3.0, True), vae=vae_flux2(),
        text_encoder=T.Qwen3ForCausalLM(qwen3_config(tok, layers=28)), tokenizer=tok,
        transformer=_flux2_dit(3 * 32, False),
    ))


@tiny(
    "flux2-klein-edit", image=[picture(), picture(96, 64, 8)], prompt=PROMPT, guidance_scale=1.0, width=64, height=64,
    max_sequence_length=64,
)
def flux2_klein_edit(ctx: Ctx) -> D.X:
    pipe = TINY["flux2-klein"].build(ctx)
    pipe.register_to_config(is_distilled=True)
    return pipe

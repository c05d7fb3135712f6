"""Cosmos 1, 2 and 2.5."""

from __future__ import annotations

from typing import Any, Self, TypeVar

import diffusers as D

from polymux.testing.tiny.encoders import qwen25_vl, t5_encoder
from polymux.testing.tiny.inputs import NEG, PROMPT, VIDEO, picture
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match, wan_scheduler
from polymux.testing.tiny.tokenizers import qwen_tokenizer, t5_tokenizer
from polymux.testing.tiny.vaes import vae_wan
from polymux.testing.tiny.weights import parts

V = TypeVar("V")


class _Passing:
    """Stands where Cosmos pipelines want their (gated) guardrail package."""

    def to(self, *args: object, **kwargs: object) -> Self:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: V) -> V:
        return video


def _cosmos_dit(**kw: Any) -> D.CosmosTransformer3DModel:
    base = dict(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=16, num_layers=2, mlp_ratio=2,
        text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(1.0, 4.0, 4.0),
        concat_padding_mask=True, extra_pos_embed_type="learnable",
    )
    return D.CosmosTransformer3DModel(**{**base, **kw})


def _without_guardrail(cls: type[D.DiffusionPipeline], **kw: Any) -> D.DiffusionPipeline:
    """Cosmos pipelines insist on NVIDIA's guardrail package; the saved index leaves the component empty."""
    pipe = cls(**kw, safety_checker=_Passing())
    pipe.register_modules(safety_checker=None)
    return pipe


@tiny(
    "cosmos1-t2w", load=dict(safety_checker=_Passing()), **VIDEO | {"num_frames": 9}, negative_prompt=NEG,
    guidance_scale=7.0, max_sequence_length=64,
)
def cosmos1_t2w(ctx: Ctx) -> D.CosmosTextToWorldPipeline:
    tok = t5_tokenizer()
    return _without_guardrail(D.CosmosTextToWorldPipeline, **parts(
        ctx, text_encoder=t5_encoder(tok), tokenizer=tok, transformer=_cosmos_dit(concat_padding_mask=True),
        vae=D.AutoencoderKLCosmos(
            encoder_block_out_channels=(8, 8, 8, 8), decode_block_out_channels=(8, 8, 8, 8), latent_channels=16,
            attention_resolutions=(8,), resolution=64, num_layers=1, patch_size=4,
        ),
        scheduler=D.EDMEulerScheduler(
            sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", final_sigmas_type="sigma_min",
        ),
    ))


@tiny(
    "cosmos2-t2i", load=dict(safety_checker=_Passing()), prompt=PROMPT, negative_prompt=NEG, width=64, height=64,
    max_sequence_length=64,
)
def cosmos2_t2i(ctx: Ctx) -> D.Cosmos2TextToImagePipeline:
    tok = t5_tokenizer()
    return _without_guardrail(D.Cosmos2TextToImagePipeline, **parts(
        ctx, text_encoder=t5_encoder(tok), tokenizer=tok, transformer=_cosmos_dit(extra_pos_embed_type=None),
        vae=vae_wan(), scheduler=flow_match(1.0, use_karras_sigmas=True),
    ))


@tiny(
    "cosmos2-v2w", load=dict(safety_checker=_Passing()), image=picture(32, 32), **VIDEO, negative_prompt=NEG,
    max_sequence_length=64,
)
def cosmos2_v2w(ctx: Ctx) -> D.Cosmos2VideoToWorldPipeline:
    tok = t5_tokenizer()
    return _without_guardrail(D.Cosmos2VideoToWorldPipeline, **parts(
        ctx, text_encoder=t5_encoder(tok), tokenizer=tok,
        transformer=_cosmos_dit(in_channels=17, extra_pos_embed_type=None), vae=vae_wan(),
        scheduler=flow_match(1.0, use_karras_sigmas=True),
    ))


@tiny(
    "cosmos25-predict", load=dict(safety_checker=_Passing()), image=picture(32, 32), **VIDEO, negative_prompt=NEG,
    max_sequence_length=512,
)
def cosmos25_predict(ctx: Ctx) -> D.Cosmos2_5_PredictBasePipeline:
    tok = qwen_tokenizer()
    return _without_guardrail(D.Cosmos2_5_PredictBasePipeline, **parts(
        ctx, text_encoder=qwen25_vl(tok), tokenizer=tok, vae=vae_wan(), scheduler=wan_scheduler(5.0),
        transformer=_cosmos_dit(
            in_channels=17, extra_pos_embed_type=None, use_crossattn_projection=True, crossattn_proj_in_channels=2 * 32,
            encoder_hidden_states_channels=32,
        ),
    ))

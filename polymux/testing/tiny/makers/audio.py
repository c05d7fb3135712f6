"""Music and sound by diffusion."""

from __future__ import annotations

import diffusers as D
import transformers as T

from polymux.testing.tiny.encoders import qwen3_config, t5_encoder
from polymux.testing.tiny.inputs import NEG
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match
from polymux.testing.tiny.tokenizers import qwen_tokenizer, t5_tokenizer
from polymux.testing.tiny.vaes import vae_oobleck
from polymux.testing.tiny.weights import parts


@tiny(
    "stable-audio", prompt="music with drums and a slow piano", negative_prompt=NEG, guidance_scale=7.0,
    audio_end_in_s=0.02,
)
def stable_audio(ctx: Ctx) -> D.StableAudioPipeline:
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    tok = t5_tokenizer()
    return D.StableAudioPipeline(**parts(
        ctx, vae=vae_oobleck(), text_encoder=t5_encoder(tok), tokenizer=tok,
        projection_model=StableAudioProjectionModel(
            text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=512,
        ),
        transformer=D.StableAudioDiTModel(
            sample_size=32, in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            num_key_value_attention_heads=2, cross_attention_dim=32, time_proj_dim=32, global_states_input_dim=64,
            cross_attention_input_dim=32,
        ),
        scheduler=D.CosineDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential",
        ),
    ))


@tiny("acestep", prompt="music with drums and a slow piano", lyrics="la la la", audio_duration=1.0)
def acestep(ctx: Ctx) -> D.AceStepPipeline:
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    tok = qwen_tokenizer()
    width = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    return D.AceStepPipeline(**parts(
        ctx, vae=vae_oobleck(rate=4800), tokenizer=tok,
        text_encoder=T.Qwen3Model(qwen3_config(tok)),
        transformer=D.AceStepTransformer1DModel(
            num_hidden_layers=2, in_channels=24, audio_acoustic_hidden_dim=8, **width,
        ),
        condition_encoder=AceStepConditionEncoder(
            text_hidden_dim=32, timbre_hidden_dim=8, num_lyric_encoder_hidden_layers=1,
            num_timbre_encoder_hidden_layers=1, **width,
        ),
        scheduler=flow_match(3.0),
    ))


@tiny("longcat-audiodit", prompt="music with drums and a slow piano", negative_prompt=NEG, audio_duration_s=0.5)
def longcat_audiodit(ctx: Ctx) -> D.LongCatAudioDiTPipeline:
    tok = t5_tokenizer()
    return D.LongCatAudioDiTPipeline(**parts(
        ctx, text_encoder=t5_encoder(tok, umt5=True), tokenizer=tok, scheduler=flow_match(1.0, invert_sigmas=True),
        vae=D.LongCatAudioDiTVae(
            in_channels=1, channels=8, c_mults=[1, 2], strides=[2, 4], latent_dim=8, encoder_latent_dim=16,
            downsampling_ratio=8, sample_rate=800,
        ),
        transformer=D.LongCatAudioDiTTransformer(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=32, latent_dim=8),
    ))

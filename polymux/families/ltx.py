"""LTX-Video and LTX-2 (video with sound)."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family
from polymux.families.sharding import (
    Cut,
    Gather,
    SequencePlan,
    Sharding,
    Split,
    TensorPlan,
    attention_cuts,
    feed_forward_cuts,
)

# The decoder takes a timestep and noise in some checkpoints only.
_DECODER = (
    ("decode_timestep", "vae", "timestep_conditioning"),
    ("decode_noise_scale", "vae", "timestep_conditioning"),
)

LTX_VIDEO = Family(
    name="ltx-video",
    pipelines=("LTXPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=25.0,
    refused=_DECODER,
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
    video_tokens=video_tokens.LTX_VIDEO,
)

LTX_VIDEO_I2V = Family(
    name="ltx-video-i2v",
    pipelines=("LTXImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=25.0,
    refused=_DECODER,
    media=(("image", 1),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
    video_tokens=video_tokens.LTX_VIDEO,
)

LTX_2 = Family(
    name="ltx-2",
    pipelines=("LTX2Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=24.0,
    refused=(*_DECODER, ("min_seconds", "duration_head", ""), ("max_seconds", "duration_head", "")),
    companions=(
        ("noise_scale", "latents", None),  # which no request can give
        ("system_prompt", "enable_prompt_enhancement", None),
        ("prompt_max_new_tokens", "enable_prompt_enhancement", None),
        ("prompt_enhancement_seed", "enable_prompt_enhancement", None),
    ),
    overruled=(("min_seconds", "num_frames"), ("max_seconds", "num_frames")),
    step_caches=step_caches.LAYERS_ALONE,
)

FAMILIES = (
    LTX_VIDEO,
    LTX_VIDEO_I2V,
    LTX_2,
)

# The text is whole on every rank, and so is the sound: what attends to them needs no other rank. Where each token has a
# timestep of its own, timesteps are split like the tokens.
_TOKENS = (
    Split(module="", argument="hidden_states", ndim=3),
    Split(module="", argument="timestep", ndim=2),
    Gather(module="proj_out"),
)


def _rope(module: str) -> tuple[Split, ...]:
    """(batch, tokens, channels), or (batch, heads, tokens, channels)."""
    dims = ((3, 1), (4, 2))
    return tuple(Split(module=module, output=i, dim=dim, ndim=ndim) for i in (0, 1) for ndim, dim in dims)


_LTX_2_ATTENTION = tuple(
    f"transformer_blocks.*.{name}"
    for name in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
)

SHARDING = (
    Sharding(
        models=("LTXVideoTransformer3DModel",),
        sequence=SequencePlan(steps=(*_TOKENS, *_rope("rope")), attention=("transformer_blocks.*.attn1",)),
        tensor=TensorPlan(
            cuts=(
                *attention_cuts("transformer_blocks.*.attn1", norms=True),
                *attention_cuts("transformer_blocks.*.attn2", norms=True),
                *feed_forward_cuts("transformer_blocks.*.ff"),
                Cut(layer="rope", by="result"),
            ),
            heads=("transformer_blocks.*.attn1.heads", "transformer_blocks.*.attn2.heads"),
        ),
    ),
    Sharding(
        models=("LTX2VideoTransformer3DModel",),
        sequence=SequencePlan(
            steps=(
                *_TOKENS,
                Split(module="", argument="video_keyframes_mask", ndim=3),
                *_rope("rope"),
                *_rope("cross_attn_rope"),
            ),
            attention=("transformer_blocks.*.attn1", "transformer_blocks.*.video_to_audio_attn"),
        ),
        tensor=TensorPlan(
            cuts=(
                *(cut for path in _LTX_2_ATTENTION for cut in attention_cuts(path, norms=True)),
                *(Cut(layer=f"{path}.to_gate_logits", by="column") for path in _LTX_2_ATTENTION),
                *feed_forward_cuts("transformer_blocks.*.ff"),
                *feed_forward_cuts("transformer_blocks.*.audio_ff"),
                *(
                    Cut(layer=name, by="result")
                    for name in ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
                ),
            ),
            heads=tuple(f"{path}.heads" for path in _LTX_2_ATTENTION),
            counts=("num_attention_heads", "audio_num_attention_heads"),
        ),
    ),
)

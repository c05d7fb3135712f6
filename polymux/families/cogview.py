"""CogView 4 and CogVideoX."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family
from polymux.families.sharding import (
    SequencePlan,
    Sharding,
    Split,
    TensorPlan,
    attention_cuts,
    block_steps,
    feed_forward_cuts,
)

COGVIEW4 = Family(
    name="cogview4",
    pipelines=("CogView4Pipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("negative_prompt", "blurry"),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
)

COGVIDEOX = Family(
    name="cogvideox",
    pipelines=("CogVideoXPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    fps=8.0,
    other_fps=(("transformer", "patch_size_t", 16.0),),  # CogVideoX 1.5
    ignored=(("eta", "schedulers of CogVideoX take it and make nothing of it"),),
    step_caches=step_caches.COGVIDEOX,
    video_tokens=video_tokens.COGVIDEOX,
)

FAMILIES = (
    COGVIEW4,
    COGVIDEOX,
)

_STREAMS = ("hidden_states", "encoder_hidden_states")

SHARDING = (
    Sharding(
        models=("CogView4Transformer2DModel", "CogVideoXTransformer3DModel"),
        sequence=SequencePlan(
            steps=(
                *block_steps("transformer_blocks", *_STREAMS),
                Split(module="transformer_blocks.*", argument="image_rotary_emb", dim=0, ndim=2),
            ),
            attention=("transformer_blocks.*.attn1",),
        ),
        tensor=TensorPlan(
            cuts=(*attention_cuts("transformer_blocks.*.attn1"), *feed_forward_cuts("transformer_blocks.*.ff")),
            heads=("transformer_blocks.*.attn1.heads",),
        ),
    ),
)

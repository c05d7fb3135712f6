"""Cosmos 1, Predict2 and Predict2.5."""

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

COSMOS_1 = Family(
    name="cosmos-1",
    pipelines=("CosmosTextToWorldPipeline",),
    modality="video",
    tasks=("text-to-video",),
    shared=("padding_mask",),
    size_multiple=16,
    frames_multiple=8,
    fps=30.0,
)

COSMOS_2_T2I = Family(
    name="cosmos-2-t2i",
    pipelines=("Cosmos2TextToImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    shared=("padding_mask",),
    size_multiple=16,
)

COSMOS_2_V2W = Family(
    name="cosmos-2-v2w",
    pipelines=("Cosmos2VideoToWorldPipeline",),
    modality="video",
    tasks=("image-to-video",),
    shared=("padding_mask",),
    size_multiple=16,
    frames_multiple=4,
    fps=16.0,
    media=(("image", 1),),
    overruled=(("video", "image"),),
)

COSMOS_2_5 = Family(
    name="cosmos-2.5",
    pipelines=("Cosmos2_5_PredictBasePipeline",),
    optional_media=(("image", 1), ("video", 1)),
    modality="video",
    tasks=("text-to-video", "image-to-video"),
    shared=("padding_mask",),
    size_multiple=16,
    frames_multiple=4,
    fps=16.0,
    companions=(("num_latent_conditional_frames", "video", None),),
    overruled=(("video", "image"), ("num_latent_conditional_frames", "image")),
)

FAMILIES = (
    COSMOS_1,
    COSMOS_2_T2I,
    COSMOS_2_V2W,
    COSMOS_2_5,
)

# Where each frame has a timestep of its own, each token has an embedding of its own.
_TIMES = ("embedded_timestep", "temb")

SHARDING = (
    Sharding(
        models=("CosmosTransformer3DModel",),
        sequence=SequencePlan(
            steps=(
                *block_steps("transformer_blocks", "hidden_states"),
                *(Split(module="rope", output=position, dim=0, ndim=2) for position in (0, 1)),
                Split(module="transformer_blocks.*", argument="extra_pos_emb", ndim=3),
                *(
                    Split(module=module, argument=name, ndim=3)
                    for module in ("transformer_blocks.*", "norm_out")
                    for name in _TIMES
                ),
            ),
            attention=("transformer_blocks.*.attn1",),
        ),
        tensor=TensorPlan(
            cuts=(
                *attention_cuts("transformer_blocks.*.attn1"),
                *attention_cuts("transformer_blocks.*.attn2"),
                *feed_forward_cuts("transformer_blocks.*.ff"),
            ),
            heads=("transformer_blocks.*.attn1.heads", "transformer_blocks.*.attn2.heads"),
        ),
    ),
)

"""Hunyuan: video, video 1.5 and image 2.1."""

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
    block_steps,
    feed_forward_cuts,
)

HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    pipelines=("HunyuanVideoPipeline",),
    companions=(("true_cfg_scale", "negative_prompt", " "), ("negative_prompt", "true_cfg_scale", None)),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    fps=24.0,
    step_caches=step_caches.HUNYUAN_VIDEO,
    video_tokens=video_tokens.HUNYUAN_VIDEO,
)

HUNYUAN_VIDEO_1_5 = Family(
    name="hunyuan-video-1.5",
    pipelines=("HunyuanVideo15Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    merge=frozenset({"encoder", "denoiser"}),
    unmerged_because="its decoder makes the attention mask of one sample for the whole batch",
    size_multiple=16,
    frames_multiple=4,
    fps=24.0,
)

HUNYUAN_VIDEO_1_5_I2V = Family(
    name="hunyuan-video-1.5-i2v",
    pipelines=("HunyuanVideo15ImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    merge=frozenset({"encoder", "denoiser"}),
    unmerged_because="its decoder makes the attention mask of one sample for the whole batch",
    size_multiple=16,
    frames_multiple=4,
    fps=24.0,
    media=(("image", 1),),
)

HUNYUAN_IMAGE_2_1 = Family(
    name="hunyuan-image-2.1",
    pipelines=("HunyuanImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    refused=(("distilled_guidance_scale", "transformer", "guidance_embeds"),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
)

FAMILIES = (
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_1_5,
    HUNYUAN_VIDEO_1_5_I2V,
    HUNYUAN_IMAGE_2_1,
)

_DOUBLE = "transformer_blocks.*"
_DOUBLE_CUTS = (
    *attention_cuts(f"{_DOUBLE}.attn", joint=True),
    *feed_forward_cuts(f"{_DOUBLE}.ff"),
    *feed_forward_cuts(f"{_DOUBLE}.ff_context"),
)
_SINGLE = "single_transformer_blocks.*"

_PICTURE_AND_TEXT = ("hidden_states", "encoder_hidden_states")

SHARDING = (
    Sharding(
        models=("HunyuanVideoTransformer3DModel", "HunyuanImageTransformer2DModel"),
        sequence=SequencePlan(
            steps=(
                *(Split(module="rope", output=position, dim=0, ndim=2) for position in (0, 1)),
                *(Split(module="transformer_blocks.0", argument=name) for name in _PICTURE_AND_TEXT),
                *(
                    Split(module=blocks, argument="attention_mask", dim=3, ndim=4, joins=_PICTURE_AND_TEXT)
                    for blocks in (_DOUBLE, _SINGLE)
                ),
                Gather(module="proj_out"),
            ),
            attention=(f"{_DOUBLE}.attn", f"{_SINGLE}.attn"),
        ),
        tensor=TensorPlan(
            cuts=(
                *_DOUBLE_CUTS,
                *attention_cuts(f"{_SINGLE}.attn"),
                Cut(layer=f"{_SINGLE}.proj_mlp", by="column"),
                Cut(layer=f"{_SINGLE}.proj_out", by="row", parts=(1, 4)),  # attention, then the wider layer
            ),
            heads=(f"{_DOUBLE}.attn.heads", f"{_SINGLE}.attn.heads"),
        ),
    ),
    Sharding(
        models=("HunyuanVideo15Transformer3DModel",),
        sequence=SequencePlan(
            steps=(
                *(Split(module="rope", output=position, dim=0, ndim=2) for position in (0, 1)),
                *block_steps("transformer_blocks", *_PICTURE_AND_TEXT),
                Split(module=_DOUBLE, argument="attention_mask", ndim=2),
            ),
            attention=(f"{_DOUBLE}.attn",),
            square_masks=True,
        ),
        tensor=TensorPlan(cuts=_DOUBLE_CUTS, heads=(f"{_DOUBLE}.attn.heads",)),
    ),
)

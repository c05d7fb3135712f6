"""Stable Diffusion 1.5, XL and 3."""

from polymux.families.base import Family
from polymux.families.sharding import (
    Gather,
    SequencePlan,
    Sharding,
    Split,
    TensorPlan,
    attention_cuts,
    feed_forward_cuts,
)

_UNET_BLOCKS = ("down_blocks", "mid_block", "up_blocks")

SD15 = Family(
    name="sd15",
    pipelines=("StableDiffusionPipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=_UNET_BLOCKS,
)

SDXL = Family(
    name="sdxl",
    pipelines=("StableDiffusionXLPipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=_UNET_BLOCKS,
)

SD3 = Family(
    name="sd3",
    pipelines=("StableDiffusion3Pipeline",),
    modality="image",
    tasks=("text-to-image",),
    companions=tuple(
        (f"skip_layer_guidance_{what}", "skip_guidance_layers", None) for what in ("scale", "start", "stop")
    ),
)

SD15_IMG2IMG = Family(
    name="sd15-img2img",
    pipelines=("StableDiffusionImg2ImgPipeline",),
    modality="image",
    tasks=("image-to-image",),
    blocks=_UNET_BLOCKS,
    media=(("image", 1),),
    picture_sized=True,
    variations=True,  # it was trained with one caption in ten left out
)

SD15_INPAINT = Family(
    name="sd15-inpaint",
    pipelines=("StableDiffusionInpaintPipeline",),
    modality="image",
    tasks=("inpainting",),
    blocks=_UNET_BLOCKS,
    media=(("image", 1), ("mask_image", 1)),
)

SDXL_IMG2IMG = Family(
    name="sdxl-img2img",
    pipelines=("StableDiffusionXLImg2ImgPipeline",),
    modality="image",
    tasks=("image-to-image",),
    warmup=(("num_inference_steps", 4),),
    blocks=_UNET_BLOCKS,
    refused=(
        ("aesthetic_score", "", "requires_aesthetics_score"),
        ("negative_aesthetic_score", "", "requires_aesthetics_score"),
    ),
    media=(("image", 1),),
    picture_sized=True,
)

FAMILIES = (
    SD15_IMG2IMG,
    SD15_INPAINT,
    SDXL_IMG2IMG,
    SD15,
    SDXL,
    SD3,
)

SHARDING = (
    Sharding(
        models=("SD3Transformer2DModel",),
        sequence=SequencePlan(
            steps=(
                Split(module="pos_embed", output=0),
                Split(module="context_embedder", output=0),
                Gather(module="proj_out"),
            ),
            attention=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
        ),
        tensor=TensorPlan(
            cuts=(
                *attention_cuts("transformer_blocks.*.attn", joint=True),
                *attention_cuts("transformer_blocks.*.attn2"),
                *feed_forward_cuts("transformer_blocks.*.ff"),
                *feed_forward_cuts("transformer_blocks.*.ff_context"),
            ),
            heads=("transformer_blocks.*.attn.heads", "transformer_blocks.*.attn2.heads"),
        ),
    ),
)

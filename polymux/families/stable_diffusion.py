"""Stable Diffusion 1.5, XL and 3."""

from polymux.families.base import Family

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

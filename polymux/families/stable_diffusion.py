"""Stable Diffusion 1.5, XL and 3."""

from polymux.families.base import Family

SD15 = Family(
    name="sd15",
    pipelines=("StableDiffusionPipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=("down_blocks", "mid_block", "up_blocks"),
)

SDXL = Family(
    name="sdxl",
    pipelines=("StableDiffusionXLPipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=("down_blocks", "mid_block", "up_blocks"),
)

SD3 = Family(
    name="sd3",
    pipelines=("StableDiffusion3Pipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (
    SD15,
    SDXL,
    SD3,
)

"""FLUX.1: text-to-image, Kontext and Fill."""

from polymux.families.base import Family

FLUX = Family(
    name="flux",
    pipelines=("FluxPipeline",),
    modality="image",
    tasks=("text-to-image",),
    refused=(("guidance_scale", "transformer", "guidance_embeds"),),
)

FLUX_KONTEXT = Family(
    name="flux-kontext",
    pipelines=("FluxKontextPipeline",),
    modality="image",
    tasks=("image-to-image", "text-to-image"),
)

FLUX_FILL = Family(
    name="flux-fill",
    pipelines=("FluxFillPipeline",),
    modality="image",
    tasks=("inpainting",),
    media=(("image", 1), ("mask_image", 1)),
)

FAMILIES = (
    FLUX,
    FLUX_KONTEXT,
    FLUX_FILL,
)

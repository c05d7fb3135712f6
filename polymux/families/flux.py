"""FLUX.1: text-to-image, Kontext and Fill."""

from polymux.families import step_caches
from polymux.families.base import Family

# Guidance with a negative prompt is off unless it is asked for.
_COMPANIONS = (("true_cfg_scale", "negative_prompt", " "), ("negative_prompt", "true_cfg_scale", None))

FLUX = Family(
    name="flux",
    pipelines=("FluxPipeline", "FluxModularPipeline"),
    modality="image",
    tasks=("text-to-image",),
    refused=(("guidance_scale", "transformer", "guidance_embeds"),),
    ignored=(("timesteps", "the modular pipeline makes its own of sigmas or of the number of steps"),),
    companions=(*_COMPANIONS, ("strength", "image", None)),  # the modular pipeline takes both
    step_caches=step_caches.FLUX,
)

FLUX_KONTEXT = Family(
    name="flux-kontext",
    pipelines=("FluxKontextPipeline",),
    optional_media=(("image", 1),),
    area="max_area",
    modality="image",
    companions=_COMPANIONS,
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

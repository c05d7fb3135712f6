"""FLUX.2: dev and klein, text-to-image and editing with up to ten reference images."""

from polymux.families import step_caches
from polymux.families.base import Family

FLUX2 = Family(
    name="flux2",
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline"),
    modality="image",
    tasks=("text-to-image", "image-to-image"),
    refused=(("guidance_scale", "", "not is_distilled"),),
    shared=("img_ids", "txt_ids"),  # it takes the positions of the first sample for all of them
    step_caches=step_caches.NOT_BY_DIFFUSERS,
)

FAMILIES = (FLUX2,)

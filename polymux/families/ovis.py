"""Ovis-Image."""

from polymux.families.base import Family

OVIS_IMAGE = Family(
    name="ovis-image",
    pipelines=("OvisImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (OVIS_IMAGE,)

"""Z-Image."""

from polymux.families.base import Family

Z_IMAGE = Family(
    name="z-image",
    pipelines=("ZImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (Z_IMAGE,)

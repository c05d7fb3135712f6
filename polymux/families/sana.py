"""Sana."""

from polymux.families.base import Family

SANA = Family(
    name="sana",
    pipelines=("SanaPipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("use_resolution_binning", False),),
)

FAMILIES = (SANA,)

"""Chroma."""

from polymux.families.base import Family

CHROMA = Family(
    name="chroma",
    pipelines=("ChromaPipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (CHROMA,)

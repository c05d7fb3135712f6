"""Krea 2."""

from polymux.families.base import Family

KREA2 = Family(
    name="krea2",
    pipelines=("Krea2Pipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (KREA2,)

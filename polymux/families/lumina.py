"""Lumina 2."""

from polymux.families.base import Family

LUMINA2 = Family(
    name="lumina2",
    pipelines=("Lumina2Pipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=("context_refiner", "noise_refiner", "layers"),
)

FAMILIES = (LUMINA2,)

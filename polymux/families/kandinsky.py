"""Kandinsky 5."""

from polymux.families.base import Family

KANDINSKY5 = Family(
    name="kandinsky5",
    pipelines=("Kandinsky5T2IPipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (KANDINSKY5,)

"""Kandinsky 5."""

from polymux.families.base import Family

KANDINSKY5 = Family(
    name="kandinsky5",
    pipelines=("Kandinsky5T2IPipeline",),
    modality="image",
    tasks=("text-to-image",),
    merge=frozenset({"encoder", "decoder"}),
    unmerged_because="merged calls differ from single ones by 3e-4 of the output, more than is allowed",
)

FAMILIES = (KANDINSKY5,)

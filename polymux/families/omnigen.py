"""OmniGen."""

from polymux.families.base import Family

OMNIGEN = Family(
    name="omnigen",
    pipelines=("OmniGenPipeline",),
    modality="image",
    tasks=("text-to-image", "image-to-image"),
    merge=frozenset({"decoder"}),
    picture_mark="<img><|image_{}|></img>",
    unmerged_because="its rotary embedding uses the positions of the first sample for the whole batch",
)

FAMILIES = (OMNIGEN,)

"""AuraFlow."""

from polymux.families.base import Family

AURAFLOW = Family(
    name="auraflow",
    pipelines=("AuraFlowPipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("height", 64), ("width", 64)),
)

FAMILIES = (AURAFLOW,)

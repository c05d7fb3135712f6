"""AuraFlow."""

from polymux.families.base import Family

AURAFLOW = Family(
    name="auraflow",
    pipelines=("AuraFlowPipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (AURAFLOW,)

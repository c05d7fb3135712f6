"""Ovis-Image."""

from polymux.families.base import Family
from polymux.families.sharding import JOINT_STEPS, SequencePlan, Sharding

OVIS_IMAGE = Family(
    name="ovis-image",
    pipelines=("OvisImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (OVIS_IMAGE,)

SHARDING = (Sharding(models=("OvisImageTransformer2DModel",), sequence=SequencePlan(steps=JOINT_STEPS)),)

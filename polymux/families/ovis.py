"""Ovis-Image."""

from polymux.families import step_caches
from polymux.families.base import Family
from polymux.families.sharding import JOINT_STEPS, SequencePlan, Sharding

OVIS_IMAGE = Family(
    name="ovis-image",
    pipelines=("OvisImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    step_caches=step_caches.NOT_BY_DIFFUSERS,
)

FAMILIES = (OVIS_IMAGE,)

SHARDING = (Sharding(models=("OvisImageTransformer2DModel",), sequence=SequencePlan(steps=JOINT_STEPS)),)

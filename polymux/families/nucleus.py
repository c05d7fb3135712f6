"""Nucleus-MoE-Image."""

from polymux.families.base import Family, Padding

NUCLEUS_MOE_IMAGE = Family(
    name="nucleus-moe-image",
    pipelines=("NucleusMoEImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    padding=(Padding(argument="encoder_hidden_states", mask="encoder_hidden_states_mask"),),
)

FAMILIES = (NUCLEUS_MOE_IMAGE,)

"""Lumina 2."""

from polymux.families.base import Family
from polymux.families.sharding import Gather, SequencePlan, Sharding, Split

LUMINA2 = Family(
    name="lumina2",
    pipelines=("Lumina2Pipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=("context_refiner", "noise_refiner", "layers"),
)

FAMILIES = (LUMINA2,)

SHARDING = (
    Sharding(
        models=("Lumina2Transformer2DModel",),
        sequence=SequencePlan(
            steps=(
                Split(module="layers.0", argument="hidden_states"),
                Split(module="layers.*", argument="attention_mask", ndim=2),
                Split(module="layers.*", argument="image_rotary_emb"),
                Gather(module="norm_out"),
            ),
            attention=("layers.*.attn",),
        ),
    ),
)

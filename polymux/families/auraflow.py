"""AuraFlow."""

from polymux.families.base import Family
from polymux.families.sharding import SequencePlan, Sharding, block_steps

AURAFLOW = Family(
    name="auraflow",
    pipelines=("AuraFlowPipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("height", 64), ("width", 64)),
)

FAMILIES = (AURAFLOW,)

SHARDING = (
    Sharding(
        models=("AuraFlowTransformer2DModel",),
        sequence=SequencePlan(
            steps=block_steps("joint_transformer_blocks", "hidden_states", "encoder_hidden_states"),
            attention=("joint_transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        ),
    ),
)

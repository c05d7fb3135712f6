"""PixArt-Sigma."""

from polymux.families.base import Family
from polymux.families.sharding import SequencePlan, Sharding, TensorPlan, attention_cuts, block_steps, feed_forward_cuts

PIXART_SIGMA = Family(
    name="pixart-sigma",
    pipelines=("PixArtSigmaPipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("use_resolution_binning", False),),
)

FAMILIES = (PIXART_SIGMA,)

SHARDING = (
    Sharding(
        models=("PixArtTransformer2DModel",),
        sequence=SequencePlan(
            steps=block_steps("transformer_blocks", "hidden_states"), attention=("transformer_blocks.*.attn1",)
        ),
        tensor=TensorPlan(
            cuts=(
                *attention_cuts("transformer_blocks.*.attn1"),
                *attention_cuts("transformer_blocks.*.attn2"),
                *feed_forward_cuts("transformer_blocks.*.ff"),
            ),
            heads=("transformer_blocks.*.attn1.heads", "transformer_blocks.*.attn2.heads"),
        ),
    ),
)

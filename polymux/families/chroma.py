"""Chroma."""

from polymux.families.base import Family
from polymux.families.sharding import Cut, Sharding, TensorPlan, attention_cuts, feed_forward_cuts

CHROMA = Family(
    name="chroma",
    pipelines=("ChromaPipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (CHROMA,)

_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"

SHARDING = (
    Sharding(
        models=("ChromaTransformer2DModel",),
        tensor=TensorPlan(
            cuts=(
                *attention_cuts(f"{_DOUBLE}.attn", joint=True),
                *feed_forward_cuts(f"{_DOUBLE}.ff"),
                *feed_forward_cuts(f"{_DOUBLE}.ff_context"),
                *attention_cuts(f"{_SINGLE}.attn"),
                Cut(layer=f"{_SINGLE}.proj_mlp", by="column"),
                Cut(layer=f"{_SINGLE}.proj_out", by="row", parts=(1, 4)),
            ),
            heads=(f"{_DOUBLE}.attn.heads", f"{_SINGLE}.attn.heads"),
        ),
    ),
)

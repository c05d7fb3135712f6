"""Bria 3 and Fibo."""

from polymux.families.base import Family

BRIA = Family(
    name="bria",
    pipelines=("BriaPipeline",),
    modality="image",
    tasks=("text-to-image",),
    blocks=("transformer_blocks", "single_transformer_blocks"),
)

BRIA_FIBO = Family(
    name="bria-fibo",
    pipelines=("BriaFiboPipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("negative_prompt", "blurry"),),
)

FAMILIES = (
    BRIA,
    BRIA_FIBO,
)

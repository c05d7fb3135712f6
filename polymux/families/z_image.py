"""Z-Image."""

from polymux.families.base import Family
from polymux.families.sharding import Cut, Gather, SequencePlan, Sharding, Split, TensorPlan, attention_cuts

Z_IMAGE = Family(
    name="z-image",
    pipelines=("ZImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
)

FAMILIES = (Z_IMAGE,)

_LISTS = ("noise_refiner", "context_refiner", "siglip_refiner", "layers")

SHARDING = (
    Sharding(
        models=("ZImageTransformer2DModel",),
        sequence=SequencePlan(
            steps=(
                Split(module="layers.0", argument="x"),
                *(Split(module="layers.*", argument=name) for name in ("attn_mask", "freqs_cis", "noise_mask")),
                Split(module="all_final_layer.*", argument="noise_mask"),
                Gather(module="all_final_layer.*"),
            ),
            attention=("layers.*.attention",),
        ),
        tensor=TensorPlan(
            cuts=(
                *(cut for name in _LISTS for cut in attention_cuts(f"{name}.*.attention")),
                *(Cut(layer=f"{name}.*.feed_forward.{w}", by="column") for name in _LISTS for w in ("w1", "w3")),
                *(Cut(layer=f"{name}.*.feed_forward.w2", by="row") for name in _LISTS),
            ),
            heads=tuple(f"{name}.*.attention.heads" for name in _LISTS),
            counts=("n_heads", "n_kv_heads"),
        ),
    ),
)

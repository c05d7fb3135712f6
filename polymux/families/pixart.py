"""PixArt-Sigma."""

from polymux.families.base import Family

PIXART_SIGMA = Family(
    name="pixart-sigma",
    pipelines=("PixArtSigmaPipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("use_resolution_binning", False),),
)

FAMILIES = (PIXART_SIGMA,)

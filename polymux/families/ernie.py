"""ERNIE-Image."""

from polymux.families.base import Family, Padding

ERNIE_IMAGE = Family(
    name="ernie-image",
    pipelines=("ErnieImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    padding=(Padding(argument="text_bth"),),  # text_lens tells the real positions
)

FAMILIES = (ERNIE_IMAGE,)

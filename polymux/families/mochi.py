"""Mochi."""

from polymux.families.base import Family

MOCHI = Family(
    name="mochi",
    pipelines=("MochiPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=6,
    fps=30.0,
)

FAMILIES = (MOCHI,)

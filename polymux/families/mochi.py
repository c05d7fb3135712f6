"""Mochi."""

from polymux.families import step_caches
from polymux.families.base import Family

MOCHI = Family(
    name="mochi",
    pipelines=("MochiPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=6,
    fps=30.0,
    step_caches=step_caches.MOCHI,
)

FAMILIES = (MOCHI,)

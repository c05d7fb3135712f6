"""MiniMax-H3: video with sound; exists as a modular pipeline only."""

from polymux.families.base import Family

MINIMAX_H3 = Family(
    name="minimax-h3",
    pipelines=("MiniMaxH3ModularPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    fps=24.0,
)

FAMILIES = (MINIMAX_H3,)

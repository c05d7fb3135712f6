"""MiniMax-H3: video with sound; exists as a modular pipeline only."""

from polymux.families.base import Family

MINIMAX_H3 = Family(
    name="minimax-h3",
    pipelines=("MiniMaxH3ModularPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    fps=24.0,
    warmup=(("num_frames", 124), ("height", 64), ("width", 64), ("num_inference_steps", 3)),  # its shortest video
)

FAMILIES = (MINIMAX_H3,)

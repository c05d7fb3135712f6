"""CogView 4 and CogVideoX."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family

COGVIEW4 = Family(
    name="cogview4",
    pipelines=("CogView4Pipeline",),
    modality="image",
    tasks=("text-to-image",),
    warmup=(("negative_prompt", "blurry"),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
)

COGVIDEOX = Family(
    name="cogvideox",
    pipelines=("CogVideoXPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    fps=8.0,
    other_fps=(("transformer", "patch_size_t", 16.0),),  # CogVideoX 1.5
    step_caches=step_caches.COGVIDEOX,
    video_tokens=video_tokens.COGVIDEOX,
)

FAMILIES = (
    COGVIEW4,
    COGVIDEOX,
)

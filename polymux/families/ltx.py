"""LTX-Video and LTX-2 (video with sound)."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family

# The decoder takes a timestep and noise in some checkpoints only.
_DECODER = (
    ("decode_timestep", "vae", "timestep_conditioning"),
    ("decode_noise_scale", "vae", "timestep_conditioning"),
)

LTX_VIDEO = Family(
    name="ltx-video",
    pipelines=("LTXPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=25.0,
    refused=_DECODER,
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
    video_tokens=video_tokens.LTX_VIDEO,
)

LTX_VIDEO_I2V = Family(
    name="ltx-video-i2v",
    pipelines=("LTXImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=25.0,
    refused=_DECODER,
    media=(("image", 1),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
    video_tokens=video_tokens.LTX_VIDEO,
)

LTX_2 = Family(
    name="ltx-2",
    pipelines=("LTX2Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=24.0,
    refused=(*_DECODER, ("min_seconds", "duration_head", ""), ("max_seconds", "duration_head", "")),
    companions=(
        ("noise_scale", "latents", None),  # which no request can give
        ("system_prompt", "enable_prompt_enhancement", None),
        ("prompt_max_new_tokens", "enable_prompt_enhancement", None),
        ("prompt_enhancement_seed", "enable_prompt_enhancement", None),
    ),
    overruled=(("min_seconds", "num_frames"), ("max_seconds", "num_frames")),
    step_caches=step_caches.LAYERS_ALONE,
)

FAMILIES = (
    LTX_VIDEO,
    LTX_VIDEO_I2V,
    LTX_2,
)

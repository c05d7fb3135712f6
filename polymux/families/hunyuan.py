"""Hunyuan: video, video 1.5 and image 2.1."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family

HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    pipelines=("HunyuanVideoPipeline",),
    companions=(("true_cfg_scale", "negative_prompt", " "), ("negative_prompt", "true_cfg_scale", None)),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    fps=24.0,
    step_caches=step_caches.HUNYUAN_VIDEO,
    video_tokens=video_tokens.HUNYUAN_VIDEO,
)

HUNYUAN_VIDEO_1_5 = Family(
    name="hunyuan-video-1.5",
    pipelines=("HunyuanVideo15Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    merge=frozenset({"encoder", "denoiser"}),
    unmerged_because="its decoder makes the attention mask of one sample for the whole batch",
    size_multiple=16,
    frames_multiple=4,
    fps=24.0,
)

HUNYUAN_VIDEO_1_5_I2V = Family(
    name="hunyuan-video-1.5-i2v",
    pipelines=("HunyuanVideo15ImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    merge=frozenset({"encoder", "denoiser"}),
    unmerged_because="its decoder makes the attention mask of one sample for the whole batch",
    size_multiple=16,
    frames_multiple=4,
    fps=24.0,
    media=(("image", 1),),
)

HUNYUAN_IMAGE_2_1 = Family(
    name="hunyuan-image-2.1",
    pipelines=("HunyuanImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    refused=(("distilled_guidance_scale", "transformer", "guidance_embeds"),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
)

FAMILIES = (
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_1_5,
    HUNYUAN_VIDEO_1_5_I2V,
    HUNYUAN_IMAGE_2_1,
)

"""Wan 2.1 and 2.2, and SkyReels-V2, which shares their denoiser."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family

_OTHER_FPS = (("", "expand_timesteps", 24.0),)  # the 5 B model, which makes video from text and from pictures
_TWO_DENOISERS = ("guidance_scale_2", "", "boundary_ratio")

WAN = Family(
    name="wan",
    pipelines=("WanPipeline", "WanModularPipeline"),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=16.0,
    other_fps=_OTHER_FPS,
    refused=(_TWO_DENOISERS,),
    step_caches=step_caches.WAN,
    video_tokens=video_tokens.WAN,
)

WAN_I2V = Family(
    name="wan-i2v",
    pipelines=("WanImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=16.0,
    other_fps=_OTHER_FPS,
    media=(("image", 1),),
    refused=(
        _TWO_DENOISERS,
        ("last_image", "", "not expand_timesteps"),  # the 5 B model takes the first picture alone
        # Of those that see the picture through CLIP, the first-last-frame model alone has a place for two.
        ("last_image", "transformer", "pos_embed_seq_len or not image_dim"),
    ),
    needed=(("last_image", "transformer", "pos_embed_seq_len"),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
    video_tokens=video_tokens.WAN,
)

WAN_VACE = Family(
    name="wan-vace",
    pipelines=("WanVACEPipeline",),
    modality="video",
    tasks=("text-to-video", "video-to-video"),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=16.0,
    blocks=("vace_blocks", "blocks"),
    step_caches=step_caches.BY_DIFFUSERS,
)

SKYREELS_V2 = Family(
    name="skyreels-v2",
    pipelines=("SkyReelsV2Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=24.0,
    step_caches=step_caches.NOT_BY_DIFFUSERS,
)

FAMILIES = (
    WAN,
    WAN_I2V,
    WAN_VACE,
    SKYREELS_V2,
)

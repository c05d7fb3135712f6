"""LTX-Video and LTX-2 (video with sound)."""

from polymux.families.base import Family

LTX_VIDEO = Family(
    name="ltx-video",
    pipelines=("LTXPipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=25.0,
)

LTX_VIDEO_I2V = Family(
    name="ltx-video-i2v",
    pipelines=("LTXImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=25.0,
    media=(("image", 1),),
)

LTX_2 = Family(
    name="ltx-2",
    pipelines=("LTX2Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=32,
    frames_multiple=8,
    fps=24.0,
)

FAMILIES = (
    LTX_VIDEO,
    LTX_VIDEO_I2V,
    LTX_2,
)

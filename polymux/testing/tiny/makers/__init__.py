"""One function per tiny checkpoint, by family; importing this registers them all.

The files are tables of shrunken configs, kept dense by hand: the formatter leaves them alone.
"""

from polymux.testing.tiny.makers import (
    audio,
    codecs,
    cosmos,
    flux,
    glm_image,
    hearing,
    image,
    language,
    modular,
    picture_tokens,
    qwen3_tts,
    qwen_image,
    qwen_omni,
    speech,
    spoken_frames,
    stable_diffusion,
    video,
    wan,
)

__all__ = [
    "audio",
    "codecs",
    "cosmos",
    "flux",
    "glm_image",
    "hearing",
    "image",
    "language",
    "modular",
    "picture_tokens",
    "qwen3_tts",
    "qwen_image",
    "qwen_omni",
    "speech",
    "spoken_frames",
    "stable_diffusion",
    "video",
    "wan",
]

"""One function per tiny checkpoint, by family; importing this registers them all.

The files are tables of shrunken configs, kept dense by hand: the formatter leaves them alone.
"""

from polymux.testing.tiny.makers import (
    audio,
    codecs,
    cosmos,
    flux,
    hearing,
    image,
    language,
    modular,
    qwen3_tts,
    qwen_image,
    qwen_omni,
    speech,
    stable_diffusion,
    video,
    wan,
)

__all__ = [
    "audio",
    "codecs",
    "cosmos",
    "flux",
    "hearing",
    "image",
    "language",
    "modular",
    "qwen3_tts",
    "qwen_image",
    "qwen_omni",
    "speech",
    "stable_diffusion",
    "video",
    "wan",
]

"""Stable Audio and ACE-Step."""

from polymux.families.base import Family

STABLE_AUDIO = Family(
    name="stable-audio",
    pipelines=("StableAudioPipeline",),
    modality="audio",
    tasks=("text-to-audio",),
    blocks=("transformer_blocks",),
)

ACE_STEP = Family(
    name="ace-step",
    pipelines=("AceStepPipeline",),
    modality="audio",
    tasks=("text-to-audio",),
    blocks=("layers",),
)

FAMILIES = (
    STABLE_AUDIO,
    ACE_STEP,
)

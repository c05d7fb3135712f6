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
    merge=frozenset({"denoiser", "decoder"}),
    unmerged_because="its condition encoder packs the reference sounds of all samples",
    blocks=("layers",),
    # Guidance is distilled into the turbo checkpoints.
    refused=tuple(
        (name, "transformer", "not is_turbo") for name in ("guidance_scale", "cfg_interval_start", "cfg_interval_end")
    ),
    overruled=(("audio_duration", "src_audio"),),
)

FAMILIES = (
    STABLE_AUDIO,
    ACE_STEP,
)

"""LongCat: image, image editing and audio."""

from polymux.families import step_caches
from polymux.families.base import Family
from polymux.families.sharding import JOINT_STEPS, SequencePlan, Sharding

LONGCAT_IMAGE = Family(
    name="longcat-image",
    pipelines=("LongCatImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    step_caches=step_caches.NOT_BY_DIFFUSERS,
)

LONGCAT_IMAGE_EDIT = Family(
    name="longcat-image-edit",
    pipelines=("LongCatImageEditPipeline",),
    modality="image",
    tasks=("image-to-image",),
    media=(("image", 1),),
)

LONGCAT_AUDIO = Family(
    name="longcat-audio",
    pipelines=("LongCatAudioDiTPipeline",),
    modality="audio",
    tasks=("text-to-audio",),
    longest="max_wav_duration",
)

FAMILIES = (
    LONGCAT_IMAGE,
    LONGCAT_IMAGE_EDIT,
    LONGCAT_AUDIO,
)

SHARDING = (Sharding(models=("LongCatImageTransformer2DModel",), sequence=SequencePlan(steps=JOINT_STEPS)),)

"""The families that polymux knows, one file each. The only place where a model's name occurs."""

from polymux.families import (
    audio,
    auraflow,
    bark,
    bria,
    canary,
    chroma,
    cogview,
    cosmos,
    csm,
    dia,
    emu3,
    ernie,
    flux,
    flux2,
    glm_image,
    hidream,
    higgs,
    hunyuan,
    janus,
    kandinsky,
    krea,
    language,
    longcat,
    ltx,
    lumina,
    minimax,
    mochi,
    moonshine,
    musicgen,
    nucleus,
    omnigen,
    ovis,
    parakeet,
    pixart,
    pocket_tts,
    qwen3_tts,
    qwen_asr,
    qwen_image,
    qwen_image_21,
    qwen_omni,
    sana,
    speecht5,
    stable_diffusion,
    text_encoders,
    vibevoice,
    vits,
    wan,
    whisper,
    z_image,
)
from polymux.families.base import UNKNOWN, Family
from polymux.families.chat import ChatFamily
from polymux.families.features import FEATURES, features_by_pipeline
from polymux.families.generate import GenerateFamily
from polymux.families.hearing import HearingFamily
from polymux.families.pictures import PictureFamily
from polymux.families.sharding import Sharding

_MODULES = (
    audio,
    auraflow,
    bria,
    chroma,
    cogview,
    cosmos,
    ernie,
    flux,
    flux2,
    glm_image,
    hidream,
    hunyuan,
    kandinsky,
    krea,
    longcat,
    ltx,
    lumina,
    minimax,
    mochi,
    nucleus,
    omnigen,
    ovis,
    pixart,
    qwen_image,
    qwen_image_21,
    sana,
    stable_diffusion,
    wan,
    z_image,
)
_FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
_BY_PIPELINE = {pipeline: family for family in _FAMILIES for pipeline in family.pipelines}
_SOUNDING = (
    bark,
    csm,
    dia,
    higgs,
    musicgen,
    pocket_tts,
    qwen3_tts,
    speecht5,
    vibevoice,
    vits,
)
_ANSWERING = (language, qwen_omni)
_DRAWING = (emu3, janus)
_CHAT_FAMILIES: tuple[ChatFamily, ...] = tuple(family for module in _ANSWERING for family in module.FAMILIES)
_PICTURE_FAMILIES: tuple[PictureFamily, ...] = tuple(family for module in _DRAWING for family in module.FAMILIES)
_HEARING = (canary, moonshine, parakeet, qwen_asr, whisper)
_HEARING_FAMILIES: tuple[HearingFamily, ...] = tuple(family for module in _HEARING for family in module.FAMILIES)
_GENERATE_FAMILIES: tuple[GenerateFamily, ...] = (
    *(family for module in _SOUNDING for family in module.FAMILIES),
    *_HEARING_FAMILIES,
    *_CHAT_FAMILIES,
    *_PICTURE_FAMILIES,
)
_SHARDED = (
    auraflow,
    chroma,
    cogview,
    cosmos,
    hunyuan,
    longcat,
    ltx,
    lumina,
    ovis,
    pixart,
    qwen_image,
    stable_diffusion,
    text_encoders,
    wan,
    z_image,
)
_SHARDINGS: tuple[Sharding, ...] = tuple(sharding for module in _SHARDED for sharding in module.SHARDING)
_SHARDING_BY_MODEL = {model: sharding for sharding in _SHARDINGS for model in sharding.models}
_BY_MODEL = {model: family for family in _GENERATE_FAMILIES for model in family.models}


def all_families() -> tuple[Family, ...]:
    """Every declared family of diffusers."""
    return _FAMILIES


def family_of(pipeline: str) -> Family:
    """The family of a pipeline class; `UNKNOWN`, with conservative defaults, if none declares it."""
    return _BY_PIPELINE.get(pipeline, UNKNOWN)


def features_of(family: Family) -> dict[str, bool | None]:
    """By name, whether the family's pipelines have it; None: some of them."""
    held = [features_by_pipeline().get(pipeline, ()) for pipeline in family.pipelines]
    counts = {name: sum(name in features for features in held) for name in FEATURES}
    return {name: None if 0 < count < len(held) else count > 0 for name, count in counts.items()}


def all_generate_families() -> tuple[GenerateFamily, ...]:
    """Every declared family of transformers."""
    return _GENERATE_FAMILIES


def generate_family_of(model: str) -> GenerateFamily | None:
    """The family of a model class of transformers; None if none declares it. Causal language models are one family,
    named or not."""
    return _BY_MODEL.get(model, language.LANGUAGE if model.endswith(language.ANY) else None)


def all_shardings() -> tuple[Sharding, ...]:
    """Every declared way of dividing a model among ranks."""
    return _SHARDINGS


def sharding_of(model: str) -> Sharding | None:
    """How a class of models may be divided among ranks; None if no family declares it."""
    return _SHARDING_BY_MODEL.get(model)

"""The families that polymux knows, one file each. The only place where a model's name occurs."""

from polymux.families import (
    audio,
    auraflow,
    bark,
    bria,
    chroma,
    cogview,
    cosmos,
    csm,
    dia,
    ernie,
    flux,
    flux2,
    hidream,
    hunyuan,
    kandinsky,
    krea,
    language,
    longcat,
    ltx,
    lumina,
    minimax,
    mochi,
    musicgen,
    nucleus,
    omnigen,
    ovis,
    pixart,
    qwen_image,
    qwen_image_21,
    qwen_omni,
    sana,
    speecht5,
    stable_diffusion,
    vits,
    wan,
    z_image,
)
from polymux.families.base import UNKNOWN, Family
from polymux.families.chat import ChatFamily
from polymux.families.generate import GenerateFamily

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
    musicgen,
    speecht5,
    vits,
)
_ANSWERING = (language, qwen_omni)
_CHAT_FAMILIES: tuple[ChatFamily, ...] = tuple(family for module in _ANSWERING for family in module.FAMILIES)
_GENERATE_FAMILIES: tuple[GenerateFamily, ...] = (
    *(family for module in _SOUNDING for family in module.FAMILIES),
    *_CHAT_FAMILIES,
)
_BY_MODEL = {model: family for family in _GENERATE_FAMILIES for model in family.models}


def all_families() -> tuple[Family, ...]:
    """Every declared family of diffusers."""
    return _FAMILIES


def family_of(pipeline: str) -> Family:
    """The family of a pipeline class; `UNKNOWN`, with conservative defaults, if none declares it."""
    return _BY_PIPELINE.get(pipeline, UNKNOWN)


def all_generate_families() -> tuple[GenerateFamily, ...]:
    """Every declared family of transformers."""
    return _GENERATE_FAMILIES


def generate_family_of(model: str) -> GenerateFamily | None:
    """The family of a model class of transformers; None if none declares it. Causal language models are one family,
    named or not."""
    return _BY_MODEL.get(model, language.LANGUAGE if model.endswith(language.ANY) else None)

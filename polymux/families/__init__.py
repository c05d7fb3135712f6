"""The families that polymux knows, one file each. The only place where a model's name occurs."""

from polymux.families import (
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
from polymux.families.base import UNKNOWN, Family

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


def all_families() -> tuple[Family, ...]:
    """Every declared family."""
    return _FAMILIES


def family_of(pipeline: str) -> Family:
    """The family of a pipeline class; `UNKNOWN`, with conservative defaults, if none declares it."""
    return _BY_PIPELINE.get(pipeline, UNKNOWN)

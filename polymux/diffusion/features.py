"""What of polymux a loaded pipeline can have: looked up in it and in its declaration, not tried.

The names are those of `polymux.families.features`. What a feature does, and the settings that ask for it, are
elsewhere; a setting that cannot act is refused where it acts, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.models.autoencoders.vae import AutoencoderMixin

from polymux.diffusion.attention import goes_through_dispatcher
from polymux.diffusion.compiled_blocks import CompiledBlocks
from polymux.diffusion.component import is_denoiser
from polymux.families.base import Family
from polymux.families.features import FEATURES
from polymux.memory.containers import block_paths
from polymux.quantization.gguf import is_read_for
from polymux.quantization.selection import may_be_quantized


def features_in(pipeline: Any, family: Family, previews: bool) -> tuple[str, ...]:
    """The features of this pipeline, in the order in which they are listed."""
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    denoisers = [module for name, module in parts.items() if name in family.denoisers or is_denoiser(name)]
    there = {*_declared(family, previews), *_of_pipeline(pipeline), *_of_denoisers(denoisers, family)}
    return tuple(name for name in FEATURES if name in there)


def _declared(family: Family, previews: bool) -> Iterator[str]:
    flags = {
        "batching": "denoiser" in family.merge,
        "guidance": family.collect_guidance,
        "previews": previews,
        "streamed_decode": family.streamed_decode,
        "block_sparse": bool(family.video_tokens),
    }
    yield from (name for name, there in flags.items() if there)
    yield from family.step_caches.backends


def _of_pipeline(pipeline: Any) -> Iterator[str]:
    autoencoders = [part for part in pipeline.components.values() if isinstance(part, AutoencoderMixin)]
    if isinstance(pipeline, LoraBaseMixin):
        yield "lora"
    if any(hasattr(vae, "use_tiling") for vae in autoencoders):
        yield "tiling"
    if any(hasattr(vae, "use_slicing") for vae in autoencoders):
        yield "slicing"


def _of_denoisers(modules: Sequence[torch.nn.Module], family: Family) -> Iterator[str]:
    if not modules:
        return
    yield "offload"
    if all(block_paths(module, family.blocks) for module in modules):
        yield "layerwise_offload"
    if any(may_be_quantized(module, block_paths(module, family.blocks)) for module in modules):
        yield "quantization"
    if all(is_read_for(type(module)) for module in modules):
        yield "gguf"
    if any(CompiledBlocks.problem(module, family) is None for module in modules):
        yield "compile"
    if any(map(goes_through_dispatcher, modules)):
        yield "attention"

"""Which layers of a component are quantized: linear ones, inside its blocks, that nobody has excepted.

What is outside of the blocks (embeddings, what reads times and prompts, the last projection) is small and decides over
everything; norms and convolutions are no linear layers. What the library keeps in fp32 stays in fp32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch

from polymux.errors import ConfigError
from polymux.quantization.layer import PackedLinear

# Parts of models whose blocks nobody knows that are kept: those that diffusers keeps when it casts layer by layer.
KEPT = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$", "embed", "lm_head")


class NothingToQuantize(Exception):
    """A component has no layers that could be."""


def linear_layers(module: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """All plain linear layers, by path. Classes made from Linear may read their weight themselves."""
    return {path: layer for path, layer in module.named_modules() if type(layer) is torch.nn.Linear}


def choose_layers(
    name: str, module: torch.nn.Module, dtype: torch.dtype, blocks: Sequence[str], ignored: Collection[str]
) -> dict[str, torch.nn.Linear]:
    """The layers to quantize, by path. `blocks`: paths of the module's blocks; `dtype`: what the component was loaded
    in. Raises NothingToQuantize, and ConfigError if something of `ignored` is nowhere."""
    every = linear_layers(module)
    for pattern in ignored:
        if not any(matches(path, pattern) for path in every):
            raise ConfigError(
                f"ignored_layers: {name} has no linear layer {pattern!r}; it has {_some(every)}",
                param="diffusion_quantization_config",
            )
    tied = shared_tensors(module)
    chosen = {
        path: layer
        for path, layer in every.items()
        if _is_inside(path, module, blocks)
        and not any(matches(path, pattern) for pattern in ignored)
        and layer.weight.dtype == dtype
        and layer.weight.numel() > 0
        and id(layer.weight) not in tied
    }
    if not chosen:
        packed = any(isinstance(layer, PackedLinear) for layer in module.modules())
        why = "it is quantized already" if packed else f"it has no linear layer to quantize: {_some(every)}"
        raise NothingToQuantize(f"{name} ({type(module).__name__}): {why}")
    return chosen


def may_be_quantized(module: torch.nn.Module, blocks: Sequence[str]) -> bool:
    """Whether it has linear layers that would be chosen, or are quantized already."""
    layers = (path for path, layer in module.named_modules() if type(layer) in (torch.nn.Linear, PackedLinear))
    return any(_is_inside(path, module, blocks) for path in layers)


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern means this layer: its path, that of a part that it is in, or with wildcards either."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def shared_tensors(module: torch.nn.Module) -> set[int]:
    counts = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    return {key for key, count in counts.items() if count > 1}


def _is_inside(path: str, module: torch.nn.Module, blocks: Sequence[str]) -> bool:
    if blocks:
        return any(path.startswith(f"{block}.") for block in blocks)
    patterns = (*KEPT, *(getattr(module, "_skip_layerwise_casting_patterns", None) or ()))
    return not any(re.search(pattern, path) for pattern in patterns)


def _some(layers: Collection[str]) -> str:
    return ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "") if layers else "none"

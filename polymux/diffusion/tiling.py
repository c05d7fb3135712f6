"""Autoencoders that work piece by piece, in less memory: diffusers' own tiling and slicing, switched on at loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diffusers.models.autoencoders.vae import AutoencoderMixin

from polymux.errors import ConfigError
from polymux.memory_config import MemoryConfig


def enable_pieces(parts: Mapping[str, object], memory: MemoryConfig) -> None:
    """Raises ConfigError if something is asked for that none of a pipeline's autoencoders can."""
    autoencoders = [part for part in parts.values() if isinstance(part, AutoencoderMixin)]
    if memory.vae_use_tiling:
        _enable("vae_use_tiling", [vae.enable_tiling for vae in autoencoders], autoencoders)
    if memory.vae_use_slicing:
        _enable("vae_use_slicing", [vae.enable_slicing for vae in autoencoders], autoencoders)


def _enable(knob: str, switches: list[Callable[[], None]], autoencoders: list[AutoencoderMixin]) -> None:
    done = [_switched(switch) for switch in switches]
    if not any(done):
        names = ", ".join(type(vae).__name__ for vae in autoencoders) or "a model without autoencoder"
        raise ConfigError(f"--{knob.replace('_', '-')}: not offered by {names}", param=knob)


def _switched(switch: Callable[[], None]) -> bool:
    try:
        switch()
    except NotImplementedError:
        return False
    return True

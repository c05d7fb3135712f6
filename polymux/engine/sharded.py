"""A model on several ranks: which components are divided among which of them, and how.

The one place where the passes of `parallel` meet an engine's components. They work on plain modules, before calls are
captured, and after the attention has its kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from polymux.config import EngineConfig
from polymux.diffusion.component import Component
from polymux.errors import ConfigError
from polymux.families.base import Family
from polymux.parallel.hsdp import shard_weights
from polymux.parallel.mesh import Mesh
from polymux.parallel.plans import sequence_plan, tensor_plan
from polymux.parallel.sequence import shard_sequence
from polymux.parallel.tensor import shard_tensor
from polymux.parallel.tiles import share_tiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """What was done, as far as it can be undone: weights that were divided stay so."""

    undoings: tuple[Callable[[], None], ...] = ()
    divided: bool = False  # a rank has only a part of the weights
    fixed: bool = False  # they cannot be moved off their device

    def undo(self) -> None:
        for undo in self.undoings:
            undo()


def shard(
    components: Sequence[Component], family: Family, config: EngineConfig, mesh: Mesh, sliced: Collection[str]
) -> Sharding:
    """Divide them; `sliced`: the names of those of which only this rank's part is there.

    Raises ConfigError if a denoiser cannot be divided as the configuration says.
    """
    undoings: list[Callable[[], None]] = []
    for component in components:
        if component.role == "denoiser":
            undoings += _denoiser(component, family, mesh, component.name in sliced)
        elif component.role == "decoder" and "decode" in component.main and config.parallel.vae_patch_parallel_size > 1:
            undoings.append(share_tiles(component.module, mesh.world).undo)
            log.info("parallel: %s: its tiles on %d ranks", component.name, mesh.size)
    if config.parallel.text_encoder_tp_size > 1:
        _text_encoders([component for component in components if component.role == "encoder"], mesh)
    return Sharding(tuple(undoings), config.parallel.divides_weights, config.parallel.use_hsdp)


def _denoiser(component: Component, family: Family, mesh: Mesh, sliced: bool) -> list[Callable[[], None]]:
    module, done, undoings = component.module, [], []
    # The plans of both are of the model's own class, which sharded weights replace by another one.
    tensor = tensor_plan(module) if mesh.degree("tp") > 1 else None
    sequence = sequence_plan(module) if mesh.sequence is not None else None
    if tensor is not None:
        shard_tensor(module, tensor, mesh.group("tp"), sliced=sliced)
        done.append(f"its layers on {mesh.degree('tp')} ranks")
    if mesh.shards is not None:
        shard_weights(module, mesh.shards, family.blocks)
        done.append(f"its blocks shared out among {mesh.shards.size(-1)} ranks")
    if sequence is not None and mesh.sequence is not None:
        undoings.append(shard_sequence(module, sequence, mesh.sequence).undo)
        done.append(f"its tokens on {mesh.sequence.whole.size()} ranks")
    if done:
        log.info("parallel: %s: %s", component.name, ", ".join(done))
    return undoings


def _text_encoders(encoders: Sequence[Component], mesh: Mesh) -> None:
    """Divide the layers of those that can be divided; there must be one."""
    reasons = []
    for component in encoders:
        try:
            shard_tensor(component.module, tensor_plan(component.module), mesh.world)
            log.info("parallel: %s: its layers on %d ranks", component.name, mesh.size)
        except ConfigError as error:  # such a one is as it was
            reasons.append(f"{component.name}: {error.message}")
            log.info("parallel: %s: whole on every rank (%s)", component.name, error.message)
    if len(reasons) == len(encoders):
        why = "; ".join(reasons) or "the model has no text encoder"
        raise ConfigError(f"--text-encoder-tp-size {mesh.size}: {why}", param="text_encoder_tp_size")

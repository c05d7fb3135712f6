"""Which process runs where: the settings of each, made from those of all."""

from __future__ import annotations

from dataclasses import replace

from polymux.config import EngineConfig
from polymux.stage_config import ReplicaConfig


def of_replica(config: EngineConfig, index: int) -> EngineConfig:
    """The settings of one replica's process: those of all, with a device of its own."""
    given, device = config.replicas, config.device.device
    if given.devices:
        device = given.devices[index]
    elif given.data_parallel_size > 1 and device in ("auto", "cuda"):
        device = f"{device}:{index}"
    return replace(config, device=replace(config.device, device=device), replicas=ReplicaConfig())

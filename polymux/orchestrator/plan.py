"""Which processes there will be, and the settings of each, made from those of all."""

from __future__ import annotations

from dataclasses import replace

from polymux.config import EngineConfig
from polymux.orchestrator.graph import graph_of
from polymux.stage_config import ReplicaConfig


def plan_of(config: EngineConfig) -> tuple[EngineConfig, ...]:
    """The settings of each stage. Raises ConfigError, CheckpointError."""
    graph = graph_of(config)
    return tuple(replace(config, stage=number) for number in range(len(graph.stages)))


def of_replica(config: EngineConfig, index: int) -> EngineConfig:
    """The settings of one replica's process: those of its stage, with a device of its own."""
    given, device = config.replicas, config.device.device
    if given.devices:
        device = given.devices[index]
    elif given.data_parallel_size > 1 and device in ("auto", "cuda"):
        device = f"{device}:{index}"
    return replace(config, device=replace(config.device, device=device), replicas=ReplicaConfig())

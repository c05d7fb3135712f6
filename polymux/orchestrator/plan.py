"""Which processes there will be, and the settings of each: those of all, and what is said of single stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.families.graph import Graph
from polymux.knobs import conflict, flag_of
from polymux.orchestrator.deploy import GROUPS, OWNERS, Deploy, StageDeploy, deploy_of, refused
from polymux.orchestrator.graph import check_acts, check_divided, graph_of
from polymux.stage_config import ReplicaConfig, StageConfig

OF_WRITERS = ("max_num_seqs", "voice_path")  # one that decodes takes chunk after chunk, of whatever request


@dataclass(frozen=True)
class StagePlan:
    """One stage: its name, the settings of all its processes, and what requests get that do not say otherwise."""

    name: str
    config: EngineConfig
    writes: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        return self.config.replicas.data_parallel_size


def plan_of(config: EngineConfig) -> tuple[StagePlan, ...]:
    """The stages of a model, in the order of the way. Raises ConfigError, CheckpointError."""
    deploy = deploy_of(config.stages)
    general = replace(config, stages=_settled(config.stages, deploy))
    graph = graph_of(general)
    for number, said in deploy.stages.items():
        if number >= len(graph.stages):
            where = next(iter(said.where.values()), f"stage {number}")
            what = f"the model has {len(graph.stages)} stages here, numbered from 0"
            if not general.stages.split_stages:
                what += "; with split_stages it may have more"
            raise refused(where, what)
    numbers = range(len(graph.stages))
    stages = tuple(_stage(general, graph, number, deploy.stages.get(number)) for number in numbers)
    for number, stage in enumerate(stages):
        _check_ranks(stage.config)
        check_divided(stage.config)
        _check_acts(stage.config, deploy.stages.get(number))
    return stages


def of_replica(config: EngineConfig, index: int) -> EngineConfig:
    """The settings of one replica's process: those of its stage, with a device of its own."""
    device = devices_of(config)[index]
    return replace(config, device=replace(config.device, device=device), replicas=ReplicaConfig())


def devices_of(config: EngineConfig) -> list[str]:
    """Of each replica of a stage."""
    given, device = config.replicas, config.device.device
    if given.devices:
        return list(given.devices)
    if given.data_parallel_size > 1 and device in ("auto", "cuda") and not config.workers.ray:
        ranks = config.parallel.world_size  # each has a device, the next ones from the replica's first
        return [f"{device}:{index * ranks}" for index in range(given.data_parallel_size)]
    return [device] * given.data_parallel_size


def _settled(stages: StageConfig, deploy: Deploy) -> StageConfig:
    """With what the file says of all stages. Raises ConfigError if a flag says something else."""
    for name, value in deploy.top.items():
        default = next(f.default for f in dataclasses.fields(stages) if f.name == name)
        if getattr(stages, name) not in (default, value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name}={value!r}: {flag} says {getattr(stages, name)!r}", param="deploy_config")
    return replace(stages, **deploy.top, deploy_config=None, stage_overrides={})


def _stage(general: EngineConfig, graph: Graph, number: int, said: StageDeploy | None) -> StagePlan:
    name, writes = graph.stages[number].name, graph.stages[number].does != "decode"
    config = replace(general, stage=number)
    if said is None:
        return StagePlan(name, config, writes)
    if number and said.default_sampling_params:
        raise refused(said.where["default_sampling_params"], "requests come to stage 0")
    for knob in OF_WRITERS:
        if knob in said.knobs and not writes:
            raise refused(f"{said.where[knob]}={said.knobs[knob]!r}", "does not act on a stage that decodes")
    config = _replicated(_changed(config, said), said)
    return StagePlan(name, config, writes, said.default_sampling_params)


def _replicated(config: EngineConfig, said: StageDeploy) -> EngineConfig:
    """With the stage's own replicas and devices, in place of those of all stages."""
    devices, count = said.devices, said.num_replicas
    if devices is None and count is None and said.data_parallel_policy is None:
        return config
    old = config.replicas
    if devices is None:
        devices = old.devices if count in (None, old.data_parallel_size) else ()
    if count is None:
        count = len(devices) or old.data_parallel_size
    where = next(said.where[key] for key in ("devices", "num_replicas", "data_parallel_policy") if key in said.where)
    policy = said.data_parallel_policy or (old.data_parallel_policy if count > 1 else None)
    given: dict[str, Any] = {"data_parallel_size": count, "devices": devices}
    if policy is not None:
        given["data_parallel_policy"] = policy
    device = "auto" if said.devices else config.device.device
    if config.workers.ray and len(set(devices)) == 1:  # Ray chooses: it is told the kind alone
        (device,), given["devices"] = {*devices}, ()
    try:
        made = ReplicaConfig(**given)
        return replace(config, replicas=made, device=replace(config.device, device=device))
    except ConfigError as error:
        raise refused(where, error.message) from None


def _by_group(knobs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in knobs.items():
        group = OWNERS[name]
        assert group in GROUPS
        found.setdefault(group, {})[name] = value
    return found


def _changed(config: EngineConfig, said: StageDeploy) -> EngineConfig:
    """With the stage's own knobs, all of them at once: one may act only with another one. Raises ConfigError that says
    where the one stands that cannot be."""
    if not said.knobs:
        return config
    try:
        groups = {group: replace(getattr(config, group), **knobs) for group, knobs in _by_group(said.knobs).items()}
        return replace(config, **groups)
    except ConfigError as error:
        blamed = [knob for knob in said.knobs if flag_of(knob) in error.message]
        if error.param is not None and error.param in said.knobs:
            blamed.insert(0, error.param)
        knob = next(iter((*blamed, *said.knobs)))
        raise refused(said.where[knob], error.message) from None


def _check_acts(config: EngineConfig, said: StageDeploy | None) -> None:
    """Raise ConfigError for a setting that cannot act on the model, with its place if it stands in the file."""
    try:
        check_acts(config)
    except ConfigError as error:
        if said is not None and error.param is not None and error.param in said.knobs:
            raise refused(said.where[error.param], error.message) from None
        raise


def _check_ranks(config: EngineConfig) -> None:
    """Raise ConfigError for ranks where there can be none, and for replicas some of whose GPUs are the same."""
    degrees, ranks = config.parallel.degrees, config.parallel.world_size
    if config.decoding.elsewhere and config.workers.ray:
        raise conflict("decoding", "worker_backend", "vllm starts its processes itself, on this host")
    if degrees and config.stages.split_stages:
        raise conflict(next(iter(degrees)), "split_stages", "a model of several stages runs on one rank")
    firsts = [
        int(number or 0) for kind, _, number in (name.partition(":") for name in devices_of(config)) if kind != "cpu"
    ]
    for one, other in itertools.pairwise(sorted(set(firsts))):
        if other < one + ranks:
            what = f"each replica takes {ranks} GPUs from its own on, for {config.parallel.describe()}"
            shown = ",".join(devices_of(config))
            raise ConfigError(f"devices={shown!r}: {what}; two of them would take cuda:{other}", param="devices")

"""The knobs of how a model is spread over processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polymux.errors import ConfigError
from polymux.knobs import Checked, check_unchanged, knob

DEVICES = "auto, auto:N, cpu, cuda and cuda:N"


def check_device(name: str, param: str) -> None:
    """Raise ConfigError if this can be the name of no device; whether it is there is for the process to see."""
    if re.fullmatch(r"cpu|(auto|cuda)(:[0-9]{1,4})?", name) is None:
        raise ConfigError(f"{param}={name!r}: allowed are {DEVICES}", param=param)


def device_names(words: Iterable[str]) -> tuple[str, ...]:
    """The names in words that have spaces or commas between them. Raises ConfigError, also if there are none."""
    names = tuple(name for word in words for name in re.split(r"[\s,]+", word) if name)
    if not names:
        raise ConfigError("devices: no device is named", param="devices")
    for name in names:
        check_device(name, "devices")
    return names


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(Checked):
    """Replicas: processes that each have the whole model, behind one queue (docs/deploy.md)"""

    data_parallel_size: int = knob(1, "replicas of the model", minimum=1, maximum=256)
    data_parallel_policy: str = knob(
        "least-queue-length",
        "which replica gets a request; session-affinity: that of the other requests of its session",
        choices=("least-queue-length", "round-robin", "random", "session-affinity"),
    )
    devices: tuple[str, ...] = knob(
        (),
        "a device for each replica, in place of --device (default: cuda:0, cuda:1, ... or the CPU)",
        metavar="DEVICE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices:
            object.__setattr__(self, "devices", device_names(self.devices))
        count = len(self.devices)
        if count not in (0, self.data_parallel_size):
            what = f"devices={','.join(self.devices)!r}: {count} devices for {self.data_parallel_size} replicas"
            raise ConfigError(f"{what} (--data-parallel-size): give one for each", param="devices")
        if self.data_parallel_size == 1:
            check_unchanged(self, "acts only with --data-parallel-size", ("data_parallel_policy",))


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Checked):
    """Workers: who starts a model's processes (docs/parallel.md#ray)"""

    worker_backend: str = knob(
        "multi_process", "multi_process: on this host; ray: wherever a Ray cluster has room for them",
        choices=("multi_process", "ray"),
    )  # fmt: skip
    ray_address: str | None = knob(
        None, "HOST:PORT of the Ray cluster (default: the one that this host is part of)", metavar="HOST:PORT"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address is None:
            return
        if not self.ray:
            raise ConfigError("--ray-address acts only with --worker-backend ray", param="ray_address")
        if re.fullmatch(r"auto|[^\s/]+:[0-9]{1,5}", self.ray_address) is None:
            what = f"ray_address={self.ray_address!r}: allowed are auto and HOST:PORT, as `ray start` has shown it"
            raise ConfigError(what, param="ray_address")

    @property
    def ray(self) -> bool:
        return self.worker_backend == "ray"


@dataclass(frozen=True, kw_only=True)
class StageConfig(Checked):
    """Stages: parts of one model in processes of their own (docs/deploy.md)"""

    split_stages: bool = knob(False, "run the stages that the model's family declares in processes of their own")
    async_chunk: bool = knob(True, "hand on chunks while they are made, in place of whole sentences")
    stage_connector: str = knob(
        "auto", "how tensors go from stage to stage; auto: shared memory on Linux, tcp elsewhere",
        choices=("auto", "shared-memory", "tcp"),
    )  # fmt: skip
    connector_host: str = knob("127.0.0.1", "tcp: the address of this host, as the other stages reach it")
    deploy_config: str | None = knob(None, "a YAML file that says what holds for single stages", metavar="FILE")
    stage_overrides: dict[str, Any] = knob(
        {}, 'the same by number of the stage, and it counts more: {"0": {"max_num_seqs": 4}}', metavar="JSON"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deploy_config is not None:
            return  # the file may say the rest; what comes of both is checked again
        if not self.split_stages:
            check_unchanged(self, "acts only with --split-stages", ("async_chunk", "stage_connector"))
        if self.stage_connector != "tcp":
            check_unchanged(self, "acts only with --stage-connector tcp", ("connector_host",))

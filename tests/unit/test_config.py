"""Every knob checks its type and its range, and flat arguments find their group."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import msgspec
import pytest

from polymux.config import EngineConfig, LimitsConfig, ModelConfig, ProcessConfig, SchedulerConfig
from polymux.errors import ConfigError
from polymux.knobs import build, field_type, groups_of, without_none
from polymux.memory_config import MemoryConfig
from polymux.server_config import ServerConfig

GROUPS = [*groups_of(EngineConfig).values(), ServerConfig, *groups_of(ServerConfig).values()]
KNOBS = [(group, f) for group in GROUPS for f in dataclasses.fields(group) if f.metadata]
REQUIRED: dict[str, Any] = {"model": "m"}


def make(group: type, **values: Any) -> Any:
    needed = {f.name: REQUIRED[f.name] for f in dataclasses.fields(group) if f.name in REQUIRED}
    return group(**needed | values)


def test_names_are_unique_across_groups() -> None:
    names = [f.name for _, f in KNOBS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("group", "f"), KNOBS, ids=lambda v: getattr(v, "name", ""))
def test_every_knob_is_documented_and_refuses_the_wrong_type(group: type, f: dataclasses.Field[Any]) -> None:
    assert f.metadata["help"]
    wrong: Any = 3 if without_none(field_type(group, f.name)) is str else "three"
    with pytest.raises(ConfigError) as caught:
        make(group, **{f.name: wrong})
    assert caught.value.param == f.name
    assert (repr(wrong) in caught.value.message) != f.metadata["secret"]


@pytest.mark.parametrize(("group", "f"), KNOBS, ids=lambda v: getattr(v, "name", ""))
def test_every_range_is_enforced(group: type, f: dataclasses.Field[Any]) -> None:
    kind = without_none(field_type(group, f.name))
    if kind == float | Literal["auto"]:
        kind = float
    outside: list[Any] = []
    if f.metadata["minimum"] is not None:
        outside.append(kind(f.metadata["minimum"] - 1))
    if f.metadata["maximum"] is not None:
        outside.append(kind(f.metadata["maximum"] + 1))
    if f.metadata["choices"] is not None:
        outside.append("no such choice")
    if kind is float:
        outside += [math.nan, math.inf, -math.inf]
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            make(group, **{f.name: value})
        assert caught.value.param == f.name


@pytest.mark.parametrize(
    ("group", "values"),
    [
        (ServerConfig, {"port": 0}),
        (ServerConfig, {"port": 65535}),
        (SchedulerConfig, {"max_num_seqs": 1, "max_queue": 0}),
        (ProcessConfig, {"shutdown_grace": 0}),
        (ProcessConfig, {"stage_init_timeout": 60}),
        (ModelConfig, {"revision": None, "diffusers_load_kwargs": {"variant": "fp16"}}),
    ],
)
def test_values_at_the_border_are_allowed(group: type, values: dict[str, Any]) -> None:
    made = make(group, **values)
    assert {name: getattr(made, name) for name in values} == values


def test_true_is_not_a_number() -> None:
    with pytest.raises(ConfigError):
        SchedulerConfig(max_num_seqs=True)


def test_flat_arguments_find_their_group() -> None:
    config = EngineConfig.from_flat(model="m", max_num_seqs=3, device="cpu", warmup=False)
    assert (config.model.model, config.scheduler.max_num_seqs, config.device.device) == ("m", 3, "cpu")
    assert config.process.warmup is False
    assert config.limits == LimitsConfig()


def test_an_unknown_argument_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"unknown argument 'max_seqs'.*max_num_seqs"):
        EngineConfig.from_flat(model="m", max_seqs=3)


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="model"):
        build(EngineConfig, {})


def test_defaults_are_not_shared_between_instances() -> None:
    ModelConfig(model="a").diffusers_load_kwargs["x"] = 1
    assert ModelConfig(model="b").diffusers_load_kwargs == {}


def test_a_config_survives_the_way_to_the_stage() -> None:
    config = EngineConfig.from_flat(model="m", max_num_seqs=3, diffusers_call_kwargs={"a": [1, None]})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"enable_cpu_offload": True, "enable_layerwise_offload": True},
            "--enable-cpu-offload --enable-layerwise-offload",
        ),
        (
            {"enable_layerwise_offload": True, "enable_distributed_layerwise_offload": True},
            "--enable-layerwise-offload --enable-distributed-layerwise-offload",
        ),
        ({"enable_cpu_offload": True, "gpu_memory_limit_gib": "auto"}, "--enable-cpu-offload --gpu-memory-limit-gib"),
        (
            {"enable_layerwise_offload": True, "gpu_memory_limit_gib": 8},
            "--enable-layerwise-offload --gpu-memory-limit-gib",
        ),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_enable_runtime_cache": True, "dlo_use_allgather": True},
            "--dlo-enable-runtime-cache --dlo-use-allgather",
        ),
        ({"dlo_resident_layers": 3}, "--dlo-resident-layers --enable-layerwise-offload"),
        ({"enable_cpu_offload": True, "dlo_resident_layers": 3}, "--dlo-resident-layers --enable-layerwise-offload"),
        (
            {"enable_layerwise_offload": True, "dlo_use_allgather": False},
            "--dlo-use-allgather --enable-distributed-layerwise-offload",
        ),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_runtime_cache_dir": "/c"},
            "--dlo-runtime-cache-dir --dlo-enable-runtime-cache",
        ),
    ],
)
def test_memory_flags_that_cannot_act_together_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryConfig(**values)
    for flag in named.split():
        assert flag in caught.value.message
    assert caught.value.param in values


def test_an_automatic_memory_limit_is_a_word_or_a_number() -> None:
    assert MemoryConfig(gpu_memory_limit_gib="auto").gpu_memory_limit_gib == "auto"
    assert MemoryConfig(gpu_memory_limit_gib=24).gpu_memory_limit_gib == 24
    with pytest.raises(ConfigError, match="gpu_memory_limit_gib='much'"):
        MemoryConfig(gpu_memory_limit_gib="much")  # type: ignore[arg-type]

"""The deploy file: what is said of single stages, in YAML, checked against the knobs that there are.

From the general to the particular: flags say what holds for all stages, the file what holds for one, and
`--stage-overrides` counts most. Knows names and values; what becomes of them is `plan`'s business.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.knobs import field_type, groups_of, knobs_of
from polymux.request import OmniDiffusionSamplingParams, SamplingParams
from polymux.spelling import shown
from polymux.stage_config import StageConfig, device_names

GROUPS = groups_of(EngineConfig)
OWNERS = knobs_of(EngineConfig)
# What holds for the model as a whole; `devices` and `num_replicas` stand for some of it.
_OF_ALL_GROUPS = ("stages", "replicas", "limits", "log")
_OF_ALL = ("model", "revision", "cache_dir", "device", "max_queue", "shutdown_grace", "restart_stages")
STAGE_KNOBS = tuple(name for name, group in OWNERS.items() if group not in _OF_ALL_GROUPS and name not in _OF_ALL)
TOP_KNOBS = ("split_stages", "async_chunk", "stage_connector", "connector_host")
_PARAMS = (SamplingParams, OmniDiffusionSamplingParams)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageDeploy:
    """What is said of one stage. `knobs`: those of STAGE_KNOBS, by name; `where`: for messages, by key."""

    devices: tuple[str, ...] | None = None
    num_replicas: int | None = None
    data_parallel_policy: str | None = None
    default_sampling_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: Mapping[str, str] = dataclasses.field(default_factory=dict)


STAGE_KEYS = ("devices", "num_replicas", "data_parallel_policy", "default_sampling_params", *STAGE_KNOBS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deploy:
    """All that is said. `top`: knobs of StageConfig that the file sets."""

    top: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stages: Mapping[int, StageDeploy] = dataclasses.field(default_factory=dict)


def deploy_of(config: StageConfig) -> Deploy:
    """From the file and the overrides that a configuration names. Raises ConfigError."""
    data = _read(config.deploy_config) if config.deploy_config is not None else {}
    _check_keys(data, ("stages", *TOP_KNOBS), "")
    said: dict[int, dict[str, tuple[Any, str]]] = {}
    for number, path, values in (*_of_file(data), *_of_overrides(config.stage_overrides)):
        stage = said.setdefault(number, {})
        for key, value in values.items():
            here, old = f"{path}{key}", stage.get(key)
            if old is not None and isinstance(old[0], dict) and isinstance(value, dict):
                value = old[0] | value
            stage[key] = (value, here)
    top = {name: data[name] for name in TOP_KNOBS if name in data}
    for name, value in top.items():
        _convert(value, field_type(StageConfig, name), name)
    return Deploy(top=top, stages={number: _stage(values) for number, values in said.items()})


def _of_file(data: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    found: dict[int, tuple[int, str, Mapping[str, Any]]] = {}
    stages = data.get("stages", [])
    if not isinstance(stages, list):
        raise _refuse("stages", stages, "must be a list of stages")
    for i, entry in enumerate(stages):
        path = f"stages[{i}]"
        if not isinstance(entry, dict):
            raise _refuse(path, entry, "must have keys and values: stage_id, and what is said of this stage")
        _check_keys(entry, ("stage_id", *STAGE_KEYS), f"{path}.")
        number = entry.get("stage_id")
        if type(number) is not int or number < 0:
            raise _refuse(f"{path}.stage_id", number, "must be the number of a stage, from 0")
        if number in found:
            raise _refuse(f"{path}.stage_id", number, "this stage stands there already")
        found[number] = (number, f"{path}.", {key: value for key, value in entry.items() if key != "stage_id"})
    return list(found.values())


def _of_overrides(overrides: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    found: list[tuple[int, str, Mapping[str, Any]]] = []
    for name, values in overrides.items():
        path = f"stage_overrides.{name}"
        if re.fullmatch(r"0|[1-9][0-9]{0,3}", name) is None:  # one spelling: none stands there twice
            raise _refuse(path, values, "must be named by the number of a stage, such as '0'")
        if not isinstance(values, dict):
            raise _refuse(path, values, "must be an object")
        _check_keys(values, STAGE_KEYS, f"{path}.")
        found.append((int(name), f"{path}.", values))
    return found


def _stage(said: Mapping[str, tuple[Any, str]]) -> StageDeploy:
    values = {key: value for key, (value, _) in said.items()}
    where = {key: path for key, (_, path) in said.items()}
    if isinstance(values.get("devices"), str):
        values["devices"] = [values["devices"]]
    for key, kind in (("devices", tuple[str, ...]), ("num_replicas", int), ("data_parallel_policy", str)):
        if key in values:
            _convert(values[key], kind, where[key])
    defaults = values.get("default_sampling_params", {})
    _check_params(defaults, where.get("default_sampling_params", ""))
    devices = values.get("devices")
    if devices is not None:
        try:
            devices = device_names(devices)
        except ConfigError as error:
            raise refused(where["devices"], error.message) from None
    return StageDeploy(
        devices=devices,
        num_replicas=values.get("num_replicas"),
        data_parallel_policy=values.get("data_parallel_policy"),
        default_sampling_params=defaults,
        knobs={name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in STAGE_KNOBS},
        where=where,
    )


def _check_params(params: Any, where: str) -> None:
    if not isinstance(params, dict):
        raise _refuse(where, params, "must have names of sampling parameters and values")
    for name, value in params.items():
        kinds = [field_type(kind, name) for kind in _PARAMS if name in kind.__dataclass_fields__]
        if not kinds:
            raise _refuse(f"{where}.{name}", value, "is no sampling parameter")
        problems = []
        for kind in kinds:
            try:
                msgspec.convert(value, kind, strict=True)
            except msgspec.ValidationError as error:
                problems.append(str(error))
        if len(problems) == len(kinds):
            raise _refuse(f"{where}.{name}", value, problems[0])


def _check_keys(data: Mapping[Any, Any], known: tuple[str, ...], path: str) -> None:
    for key, value in data.items():
        if key not in known:
            raise _refuse(f"{path}{key}", value, f"is no key here; known are {', '.join(known)}")


def _convert(value: Any, kind: Any, where: str) -> None:
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _refuse(where, value, str(error)) from None


def refused(where: str, why: str) -> ConfigError:
    """What is wrong at a place of the file or of the overrides."""
    param = "stage_overrides" if where.startswith("stage_overrides") else "deploy_config"
    return ConfigError(f"{where}: {why}", param=param)


def _refuse(where: str, value: Any, why: str) -> ConfigError:
    return refused(f"{where}={shown(value)}", why)


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deploy_config={path!r} cannot be read: {error}", param="deploy_config") from None
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # Its constructors let pass what Python says of a day that there is not, or of `!!bool maybe`.
        what = " ".join(_told(error).split())
        raise ConfigError(f"deploy_config={path!r} is not valid YAML: {what}", param="deploy_config") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise _refuse("deploy_config", path, "must hold keys and values, such as stages")
    return data


def _told(error: Exception) -> str:
    """What is wrong, and where."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return str(error)
    mark = error.problem_mark or error.context_mark
    return error.problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # of a library without types
    """Refuses a key that stands twice: one of the values would be ignored. What a merge key (`<<`) brings may be
    written anew beside it: so this looks before anything is merged."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = ["<<" if key.tag == _MERGE else self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} stands twice", node.value[i][0].start_mark
                )
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put in what merge keys bring."""
        for key, value in node.value:
            brought = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if key.tag == _MERGE and not all(isinstance(one, yaml.MappingNode) for one in brought):
                what = (
                    "<< brings in keys and values that stand elsewhere: it must be an alias (*name), or a list of such"
                )
                raise yaml.constructor.ConstructorError(None, None, what, value.start_mark)
        super().flatten_mapping(node)


_MERGE = "tag:yaml.org,2002:merge"

"""`polymux deploy-config MODEL`: which stages a model would run in, and with which settings, as a deploy file."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import yaml

from polymux.cli.flags import add_config, given
from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.knobs import build
from polymux.orchestrator.deploy import OWNERS, STAGE_KNOBS, TOP_KNOBS
from polymux.orchestrator.graph import check_model
from polymux.orchestrator.plan import OF_WRITERS, StagePlan, devices_of, plan_of

HELP = "print how a model would be spread over processes, as a deploy file"
USAGE = "polymux deploy-config MODEL [flags]"

_ALWAYS = ("dtype", "max_num_seqs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_config(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> int:
    values = given(arguments, EngineConfig)
    positional: str | None = arguments.positional_model
    if positional is not None and values.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are given: {positional} and --model {values['model']}")
    if "model" not in values:
        raise ConfigError("no model is given: name one, for example: polymux deploy-config demo")
    config = build(EngineConfig, values)
    check_model(config.model)
    print(effective(config), end="")
    return 0


def effective(config: EngineConfig) -> str:
    """The deploy file that says all of it. Raises ConfigError, CheckpointError."""
    plan = plan_of(config)
    settled = plan[0].config.stages
    top: dict[str, Any] = {}
    if settled.split_stages:
        names = TOP_KNOBS if settled.stage_connector == "tcp" else TOP_KNOBS[:-1]
        top = {name: getattr(settled, name) for name in names}
    data = top | {"stages": [_stage(number, stage) for number, stage in enumerate(plan)]}
    lines = yaml.safe_dump(data, sort_keys=False, allow_unicode=True).splitlines()
    return "\n".join(["# " + ", ".join(f"{i}: {stage.name}" for i, stage in enumerate(plan)), *lines]) + "\n"


def _stage(number: int, stage: StagePlan) -> dict[str, Any]:
    config = stage.config
    entry: dict[str, Any] = {"stage_id": number, "num_replicas": stage.replicas, "devices": devices_of(config)}
    if stage.replicas > 1:
        entry["data_parallel_policy"] = config.replicas.data_parallel_policy
    for name in STAGE_KNOBS:
        group = getattr(config, str(OWNERS[name]))
        f = next(f for f in dataclasses.fields(group) if f.name == name)
        value = getattr(group, name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if name in OF_WRITERS and not stage.writes:
            continue
        if name in _ALWAYS or value != default:
            entry[name] = list(value) if isinstance(value, tuple) else value
    if stage.defaults:
        entry["default_sampling_params"] = dict(stage.defaults)
    return entry

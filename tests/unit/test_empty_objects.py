"""An empty JSON object is given: what it belongs to may refuse it, and nobody takes it for nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polymux.cli import serve
from polymux.cli.flags import Parser
from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.families import generate_family_of
from polymux.knobs import field_type, groups_of, without_none
from polymux.loading.generate import check_settings

# Of these an empty one asks for what it says: to pass on, or change, nothing.
ADDITIONS = {"diffusers_load_kwargs", "diffusers_call_kwargs", "stage_overrides"}
OBJECTS = [
    (name, f)
    for name, group in groups_of(EngineConfig).items()
    for f in dataclasses.fields(group)
    if without_none(field_type(group, f.name)) == dict[str, Any]
]
REFUSED = {  # what an empty one lacks
    "cache_config": "--cache-config acts only with --cache-backend",
    "profiler_config": "missing required field `profiler`",
    "diffusion_quantization_config": "names neither a method nor a component",
}


def config_of(flag: str, *others: str) -> EngineConfig:
    parser = Parser(prog="polymux")
    serve.add_arguments(parser)
    return serve.configs(parser.parse(["a-model", *others, f"--{flag.replace('_', '-')}", "{}"]))[0]


@pytest.mark.parametrize(("group", "f"), OBJECTS, ids=lambda v: getattr(v, "name", v))
def test_an_empty_object_is_given(group: str, f: dataclasses.Field[Any]) -> None:
    if f.name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[f.name]) as caught:
            config_of(f.name)
        assert caught.value.param == f.name
        return
    config = config_of(f.name)
    assert getattr(getattr(config, group), f.name) == {}
    assert (config == EngineConfig.from_flat(model="a-model")) == (f.name in ADDITIONS)


@pytest.mark.parametrize("name", sorted({f.name for _, f in OBJECTS} - ADDITIONS - REFUSED.keys()))
def test_it_is_refused_where_others_are(name: str) -> None:
    """On a model of transformers, which has none of what they are for."""
    family = generate_family_of("VitsModel")
    assert family is not None
    with pytest.raises(ConfigError, match="acts only on pipelines of diffusers"):
        check_settings(config_of(name), family)


def test_of_compilation() -> None:
    compilation = config_of("compilation_config").compilation
    settings, why = compilation.choice("cpu")
    assert settings == EngineConfig.from_flat(model="a").compilation.settings and why == "--compilation-config"
    assert compilation.asked_by == "compilation_config"
    with pytest.raises(ConfigError, match="--enforce-eager and --compilation-config exclude each other"):
        config_of("compilation_config", "--enforce-eager")


def test_two_that_choose_the_same() -> None:
    with pytest.raises(ConfigError, match="--quantization and --diffusion-quantization-config exclude each other"):
        config_of("diffusion_quantization_config", "--quantization", "int8")
    steps = config_of("cache_config", "--cache-backend", "first_block").caches.steps
    assert steps == EngineConfig.from_flat(model="a", cache_backend="first_block").caches.steps

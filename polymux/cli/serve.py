"""`polymux serve MODEL`: the HTTP server."""

from __future__ import annotations

import argparse

from polymux.cli.flags import add_config, add_group, given
from polymux.config import EngineConfig, ServerConfig, build, groups_of
from polymux.errors import ConfigError

HELP = "serve a model over HTTP, with OpenAI's API"
USAGE = "polymux serve MODEL [flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_group(parser, ServerConfig)
    add_config(parser, EngineConfig)


def configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """What the command line asks for. Raises ConfigError."""
    values = given(arguments, *groups_of(EngineConfig).values())
    positional: str | None = arguments.positional_model
    if positional is not None and values.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are given: {positional} and --model {values['model']}")
    if "model" not in values:
        raise ConfigError("no model is given: name one, for example: polymux serve demo")
    return build(EngineConfig, values), ServerConfig(**given(arguments, ServerConfig))


def run(arguments: argparse.Namespace) -> int:
    engine, server = configs(arguments)
    from polymux.server.run import run as run_server  # here, so that --help and other commands need no web framework

    return run_server(engine, server)

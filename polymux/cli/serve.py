"""`polymux serve MODEL`: the HTTP server."""

from __future__ import annotations

import argparse

from polymux.cli.flags import add_config, given
from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.knobs import build
from polymux.server_config import ServerConfig

HELP = "serve a model over HTTP, with OpenAI's API"
USAGE = "polymux serve MODEL [flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_config(parser, ServerConfig)
    add_config(parser, EngineConfig)


def configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """What the command line asks for. Raises ConfigError."""
    values = given(arguments, EngineConfig)
    positional: str | None = arguments.positional_model
    if positional is not None and values.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are given: {positional} and --model {values['model']}")
    if "model" not in values:
        raise ConfigError("no model is given: name one, for example: polymux serve demo")
    return build(EngineConfig, values), build(ServerConfig, given(arguments, ServerConfig))


def run(arguments: argparse.Namespace) -> int:
    engine, server = configs(arguments)
    from polymux.server.run import run as run_server  # here, so that --help and other commands need no web framework

    return run_server(engine, server)

"""`polymux bench serve`: load a running server and measure it."""

from __future__ import annotations

import argparse

from polymux.bench.settings import BenchSettings
from polymux.cli.flags import add_config, given
from polymux.knobs import build

HELP = "load a running server, of polymux or another one, and measure it"
USAGE = "polymux bench serve [flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("serve",), help="what is measured: a server over HTTP")
    add_config(parser, BenchSettings)


def run(arguments: argparse.Namespace) -> int:
    settings = build(BenchSettings, given(arguments, BenchSettings))
    from polymux.bench.run import run as run_bench  # here, so that --help needs no HTTP client

    return run_bench(settings)

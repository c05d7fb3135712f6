"""The command `polymux`. Knows the subcommands and the exit codes; each subcommand is a module of its own.

Exit codes: 0 done; 1 it failed; 2 the command line is wrong; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from polymux.cli import bench, cache, deploy_config, generate, models, serve, speak
from polymux.cli.flags import Parser
from polymux.errors import ConfigError, InvalidRequestError, PolymuxError
from polymux.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    parser, commands = _build()
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = commands.get(words[0]) if words else None
    if chosen is None:
        parser.parse(words)  # --help, --version, or an error
        parser.print_help()
        return 2
    namespace = chosen.parse(words[1:])
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return int(namespace.run(namespace))
    except KeyboardInterrupt:
        return 130
    except PolymuxError as error:
        print(f"{chosen.prog}: error: {_one_line(error, chosen)}", file=sys.stderr)
        return exit_code(error)


def _terminated(number: int, _: object) -> NoReturn:
    """As an exception, so that what is open is closed, and files that were begun go. `serve` has a way of its own."""
    raise SystemExit(128 + number)


def exit_code(error: PolymuxError) -> int:
    """2 if the command line asked for what cannot be, 1 if what it asked for went wrong."""
    return 2 if isinstance(error, (ConfigError, InvalidRequestError)) else 1


def _build() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="polymux", description="Serves generative models of text, image, video and audio.")
    parser.add_argument("--version", action="version", version=f"polymux {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    commands: dict[str, Parser] = {}
    for module in (serve, generate, speak, models, cache, deploy_config, bench):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP, usage=module.USAGE)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
        commands[name] = command
    return parser, commands


def _one_line(error: PolymuxError, parser: Parser) -> str:
    flag = parser.flag_for(error.param)
    message = " ".join(error.message.split())
    return f"argument {flag}: {message}" if flag else message

"""Command-line flags, made from the knobs in `polymux.config`.

Knows how a knob becomes a flag and a string a value; what is allowed is the config's business. Flags that are not given
leave no trace, so every default stays where it is defined.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from polymux.cli.dotted import put_together
from polymux.knobs import Checked, field_type, groups_of, knobs_of, without_none


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and no flag twice, and says what is wrong in one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        for name, action in _ONCE.items():
            self.register("action", name, action)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Like parse_args, but an unknown flag gets the closest known one as a hint."""
        # Intermixed: words may stand behind flags too. A parser with subcommands does not know whose words they are.
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        objects = [flag for flag, action in self._option_string_actions.items() if action.type is json_object]
        try:
            words = put_together(sys.argv[1:] if arguments is None else arguments, objects)
        except ValueError as error:
            self.error(str(error))
        namespace, unknown = parse(words)
        if unknown:
            wrong = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            near = difflib.get_close_matches(wrong, list(self._option_string_actions), n=1)
            self.error(f"unknown argument {wrong}" + (f"; did you mean {near[0]}?" if near else ""))
        return namespace

    def flag_for(self, name: str | None) -> str | None:
        """The flag that sets `name`, if there is one."""
        flags = [flag for flag, action in self._option_string_actions.items() if action.dest == name]
        return next((flag for flag in flags if flag.startswith("--")), None)


class _Once(argparse.Action):
    """Beside an action: what a flag sets is set once. Of two values, one would be ignored."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string is not None:
            seen: dict[str, str] = namespace.__dict__.setdefault(_SEEN, {})
            if self.dest in seen:
                both = {seen[self.dest]: None, option_string: None}  # a set that keeps the order
                parser.error(f"argument {' and '.join(both)}: given twice")
            seen[self.dest] = option_string
        super().__call__(parser, namespace, values, option_string)


class _Store(_Once, argparse._StoreAction):
    pass


class _StoreTrue(_Once, argparse._StoreTrueAction):
    pass


class _StoreFalse(_Once, argparse._StoreFalseAction):
    pass


class _OnOrOff(_Once, argparse.BooleanOptionalAction):
    pass


_SEEN = "flags that were given"  # not a name that a flag could have
_ONCE = {None: _Store, "store": _Store, "store_true": _StoreTrue, "store_false": _StoreFalse}


def add_config(parser: argparse.ArgumentParser, config: type) -> None:
    """All knobs of `config`, group by group: first its own, if it has any."""
    if issubclass(config, Checked):
        add_group(parser, config)
    for group in groups_of(config).values():
        add_group(parser, group)


def add_group(parser: argparse.ArgumentParser, group: type[Checked]) -> None:
    """The knobs of one group, under a heading made from the first line of its docstring."""
    title, _, description = (group.__doc__ or group.__name__).partition(": ")
    target = parser.add_argument_group(title, description or None)
    for f in dataclasses.fields(group):  # type: ignore[arg-type]  # every group is a dataclass
        if f.metadata:
            _add(target, f, field_type(group, f.name))


def flag_of(f: dataclasses.Field[Any]) -> str:
    flag: str | None = f.metadata["flag"]
    return flag or "--" + f.name.replace("_", "-")


def given(namespace: argparse.Namespace, config: type) -> dict[str, Any]:
    """The knobs of `config` that were given on the command line, by name."""
    names = knobs_of(config)
    return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(namespace).items() if name in names}


def json_object(text: str) -> dict[str, Any]:
    """A JSON object from the command line."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object, such as '{\"name\": 1}'")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One of the values of a key that stands twice would be ignored."""
    names = [name for name, _ in pairs]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{name!r} stands twice")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _add(target: argparse._ArgumentGroup, f: dataclasses.Field[Any], kind: Any) -> None:
    kind, flag = without_none(kind), flag_of(f)
    shared: dict[str, Any] = dict(dest=f.name, default=argparse.SUPPRESS, help=_help(f))
    if kind is bool and f.default is False:
        target.add_argument(flag, action="store_true", **shared)
    elif kind is bool and f.metadata["flag"]:
        target.add_argument(flag, action="store_false", **shared)  # a flag of its own name turns the knob off
    elif kind is bool and f.metadata["off"]:
        target.add_argument(flag, action="store_true", **shared)
        target.add_argument(f.metadata["off"], action="store_false", **shared | {"help": f"the opposite of {flag}"})
    elif kind is bool:
        target.add_argument(flag, action=_OnOrOff, **shared)
    else:
        choices, metavar = f.metadata["choices"], f.metadata["metavar"]
        if choices is None and metavar is None:
            metavar = _METAVARS.get(kind, f.name.rpartition("_")[2].upper())
        several: dict[str, Any] = dict(nargs="+", action="extend") if kind == tuple[str, ...] else {}
        flags = [flag, *filter(None, [f.metadata["alias"]])]
        target.add_argument(
            *flags, type=_CONVERTERS.get(kind, str), choices=choices, metavar=metavar, **shared, **several
        )


def _help(f: dataclasses.Field[Any]) -> str:
    text = str(f.metadata["help"]).replace("%", "%%")
    shown = f.default not in (dataclasses.MISSING, None, ()) and not isinstance(f.default, bool)
    return f"{text} (default: {f.default})" if shown else text


def _number_or_auto(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number or auto") from None


_CONVERTERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    float | Literal["auto"]: _number_or_auto,
    dict[str, Any]: json_object,
}
_METAVARS: dict[Any, str] = {int: "N", float: "X", float | Literal["auto"]: "X|auto"}

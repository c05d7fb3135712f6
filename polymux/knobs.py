"""How a knob is declared, checked, found and set. The knobs themselves stand in `polymux.config`."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Collection
from dataclasses import field
from typing import Any, TypeVar

import msgspec

from polymux.errors import ConfigError

Group = TypeVar("Group")


def knob(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    flag: str | None = None,
    alias: str | None = None,
    off: str | None = None,
    metavar: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with what is allowed and what it is for. `flag` replaces the flag made from the name; `alias`
    is another one for the same; `off` is the flag that sets a bool to False where None, the default, is something else;
    a secret value is never shown."""
    meta = dict(
        help=help,
        choices=choices,
        minimum=minimum,
        maximum=maximum,
        flag=flag,
        alias=alias,
        off=off,
        metavar=metavar,
        secret=secret,
    )
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=meta)
    return field(default=default, metadata=meta, repr=not secret)


class Checked:
    """Checks every field's type and range when an instance is made."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(typing.cast(Any, self)):
            if f.metadata:
                _check(f, field_type(type(self), f.name), getattr(self, f.name))


def check_unchanged(group: Checked, why: str, names: Collection[str] | None = None) -> None:
    """Raise ConfigError if a knob of this group, one of `names` if they are given, is not at its default: it would be
    ignored."""
    for f in dataclasses.fields(typing.cast(Any, group)):
        unset = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if (names is None or f.name in names) and getattr(group, f.name) != unset:
            raise ConfigError(f"--{f.name.replace('_', '-')} {why}", param=f.name)


def field_type(group: type, name: str) -> Any:
    """The resolved annotation of a field."""
    return typing.get_type_hints(group)[name]


def _check(f: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    name, meta = f.name, f.metadata
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        shown = "..." if meta["secret"] else repr(value)
        raise ConfigError(f"{name}={shown}: {error}", param=name) from None
    if value is None:
        return
    if meta["choices"] is not None and value not in meta["choices"]:
        raise ConfigError(f"{name}={value!r}: allowed are {', '.join(meta['choices'])}", param=name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}: must be a finite number", param=name)
    if isinstance(value, str):
        return
    if meta["minimum"] is not None and value < meta["minimum"]:
        raise ConfigError(f"{name}={value!r}: must be at least {meta['minimum']}", param=name)
    if meta["maximum"] is not None and value > meta["maximum"]:
        raise ConfigError(f"{name}={value!r}: must be at most {meta['maximum']}", param=name)


def flag_of(name: str) -> str:
    """The flag of a knob, as people write it."""
    return "--" + name.replace("_", "-")


def conflict(one: str, other: str, reason: str) -> ConfigError:
    """Two knobs that cannot be set both."""
    return ConfigError(f"{flag_of(one)} and {flag_of(other)} exclude each other: {reason}", param=one)


def groups_of(config: type) -> dict[str, type]:
    """Field name -> group class, for the fields of `config` that are groups of knobs."""
    hints = typing.get_type_hints(config)
    return {f.name: hints[f.name] for f in dataclasses.fields(config) if _is_group(hints[f.name])}


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Checked)


def knobs_of(config: type) -> dict[str, str | None]:
    """Every knob of `config`, with the name of the group it is in; None: it is `config`'s own."""
    own: dict[str, str | None] = {f.name: None for f in dataclasses.fields(config) if f.metadata}
    return own | {f.name: name for name, group in groups_of(config).items() for f in dataclasses.fields(group)}


def build(config: type[Group], values: dict[str, Any]) -> Group:
    """Sort flat keyword arguments into the groups of `config` and its own knobs."""
    groups, owner = groups_of(config), knobs_of(config)
    for key in values:
        if key not in owner:
            raise ConfigError(f"unknown argument {key!r}; known are {', '.join(sorted(owner))}", param=key)
    made = {key: value for key, value in values.items() if owner[key] is None}
    for name, group in groups.items():
        mine = {k: v for k, v in values.items() if owner[k] == name}
        missing = [f.name for f in dataclasses.fields(group) if _required(f) and f.name not in mine]
        if missing:
            raise ConfigError(f"missing argument {missing[0]!r}", param=missing[0])
        made[name] = group(**mine)
    return config(**made)


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def without_none(kind: Any) -> Any:
    """`int` for `int | None`; other types as they are."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        return functools.reduce(operator.or_, kinds)
    return kind

"""`--flag.key.key VALUE`: parts of a flag's JSON object as flags of their own, put together into one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any


def put_together(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """The words with one JSON object for all dotted ones of each of `flags`. Raises ValueError.

    A value is JSON where it can be read as such, and text else.
    """
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            return [*rest, *_as_words(found), word, *waiting]
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        if not dot or flag not in flags:
            rest.append(word)
            continue
        text = value if equals else next(waiting, None)
        if text is None or (not equals and text.startswith("--")):
            raise ValueError(f"argument {name}: expected one argument")
        _put(found.setdefault(flag, {}), path.split("."), _value(text), name)
    return [*rest, *_as_words(found)]


def _as_words(found: dict[str, dict[str, Any]]) -> list[str]:
    return [word for flag, tree in found.items() for word in (flag, json.dumps(tree))]


def _put(tree: dict[str, Any], keys: list[str], value: Any, name: str) -> None:
    if not all(keys):
        raise ValueError(f"argument {name}: a key is missing between its dots")
    *above, last = keys
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"argument {name}: a part of it has a value already")
    if last in tree:
        raise ValueError(f"argument {name}: given twice")
    tree[last] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

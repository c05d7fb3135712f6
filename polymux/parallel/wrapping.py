"""Functions put around the methods of modules, on the instances; and taken off again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

Forward = Callable[..., Any]


class Wrapping:
    """A hook would do for submodules, but an engine calls a component's forward itself, past its hooks."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, str, Forward | None]] = []

    def around(self, module: torch.nn.Module, make: Callable[[Forward], Forward], name: str = "forward") -> None:
        """`make` gets the method as it is, and gives the new one."""
        inner = getattr(module, name)
        outer = functools.wraps(inner)(make(inner))
        self._before.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = outer

    def undo(self) -> None:
        while self._before:
            module, name, method = self._before.pop()
            if method is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = method


def members(module: torch.nn.Module, pattern: str) -> list[tuple[str, torch.nn.Module]]:
    """The submodules of this path, in which a `*` stands for each member of a list. Empty if there is none."""
    found: list[tuple[str, torch.nn.Module]] = [("", module)]
    for atom in pattern.split(".") if pattern else ():
        found = [
            (f"{path}.{name}" if path else name, child)
            for path, parent in found
            for name, child in parent.named_children()
            if atom in (name, "*")
        ]
    return found


def shapes_of(value: Any) -> Hashable:
    """What is the same on all ranks about the arguments of a call."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((key, shapes_of(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(shapes_of, value))
    return value if isinstance(value, (int, float, str)) else None

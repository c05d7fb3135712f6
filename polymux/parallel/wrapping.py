"""Functions put around the forward of modules, on the instances; and taken off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[..., Any]


class Wrapping:
    """A hook would do for submodules, but an engine calls a component's forward itself, past its hooks."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, Forward | None]] = []

    def around(self, module: torch.nn.Module, make: Callable[[Forward], Forward]) -> None:
        """`make` gets the forward as it is, and gives the new one."""
        inner = module.forward
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = functools.wraps(inner)(make(inner))

    def undo(self) -> None:
        while self._before:
            module, forward = self._before.pop()
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


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

"""The layers of a decoder as compiled code, for steps of one token per sequence: one compilation for all of them.

What is compiled is the forward of the layers' class, with the layer as its first argument, so that its weights are
inputs of the code. It runs inside `active` alone: prompts, which come in all lengths, run layers as they are. Knows
modules; not what they compute.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.config import patch as dynamo_settings

Run = Callable[..., Any]
MOST_GRAPHS = 32  # of a class's forward: one row, any number of rows, and this for each width
BACKEND = "inductor"
# Of it: weights are read at the memory's full speed for a single row.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"coordinate_descent_tuning": True}


class CompiledLayers:
    """Of some decoders: the members of their lists of layers."""

    def __init__(self, *decoders: torch.nn.Module) -> None:
        self._on = False
        for decoder in decoders:
            kinds: dict[type, Run] = {}
            for layer in _repeated(decoder):
                kind = kinds.setdefault(type(layer), _compiled(_own(type(layer).forward)))
                layer.__dict__["forward"] = functools.partial(self._forward, layer, layer.forward, kind)

    @contextmanager
    def active(self) -> Iterator[None]:
        """What runs in here, runs compiled."""
        self._on = True
        try:
            with dynamo_settings(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
                yield
        finally:
            self._on = False

    def function(self, given: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same, compiled where layers are."""
        compiled = _compiled(given)

        def run(*args: Any) -> torch.Tensor:
            return compiled(*args) if self._on else given(*args)

        return run

    def _forward(
        self,
        layer: torch.nn.Module,
        original: Callable[..., Any],
        compiled: Callable[..., Any],
        *args: Any,
        **named: Any,
    ) -> Any:
        return compiled(layer, *args, **named) if self._on else original(*args, **named)


def _own(forward: Any) -> Run:
    """The same function as code of its own: of what runs with sizes that differ, torch takes sizes to be unknown, and
    decoders of one class may differ."""
    made = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _compiled(function: Run) -> Run:
    made: Run = torch.compile(function, backend=BACKEND, options=_OPTIONS if BACKEND == "inductor" else None)
    return made


def _repeated(decoder: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of its longest list of modules that consist of modules and are all of one class."""
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    alike = [one for one in lists if len({*map(type, one)}) == 1 and any(True for _ in one[0].children())]
    yield from max(alike, key=len, default=())

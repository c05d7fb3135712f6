"""The layers of a decoder as compiled code, for steps of one token per sequence: few compilations for all of them.

What is compiled is the forward of the layers' class, with the layer as its first argument, so that its weights are
inputs of the code; once for a single row, and once for any number of them. It runs inside `active` alone: prompts,
which come in all lengths, run layers as they are. Knows modules; not what they compute.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.config import patch as dynamo_settings
from torch.fx.experimental._config import patch as shape_settings  # type: ignore[attr-defined]  # made as it is imported

Run = Callable[..., Any]
MOST_GRAPHS = 32  # of one function: many more than there are
BACKEND = "inductor"
# Of it: a product with a single row becomes a sum, which reads weights at nearly the memory's full speed.
_SINGLE: dict[str, str | int | bool | Callable[..., Any]] = {"coordinate_descent_tuning": True}


class CompiledLayers:
    """Of some decoders: the members of their lists of layers."""

    def __init__(self, *decoders: torch.nn.Module) -> None:
        self._on = False
        for decoder in decoders:
            kinds: dict[type, Run] = {}
            for layer in _repeated(decoder):
                kind = kinds.setdefault(type(layer), _compiled(type(layer).forward, tuned=True))
                layer.__dict__["forward"] = functools.partial(self._forward, layer, layer.forward, kind)

    @contextmanager
    def active(self) -> Iterator[None]:
        """What runs in here, runs compiled."""
        self._on = True
        try:
            limits = dynamo_settings(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True)
            with limits, shape_settings(use_duck_shape=False):  # as many rows as columns are still rows
                yield
        finally:
            self._on = False

    def function(self, given: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same, compiled where layers are. Its first argument is a tensor of rows."""
        compiled = _compiled(given, tuned=False)

        def run(first: torch.Tensor, *args: Any) -> torch.Tensor:
            made: torch.Tensor = compiled(len(first), first, *args) if self._on else given(first, *args)
            return made

        return run

    def _forward(
        self, layer: torch.nn.Module, original: Run, compiled: Run, hidden: torch.Tensor, *args: Any, **named: Any
    ) -> Any:
        """`hidden` (rows, 1, channels), or (1, rows, channels)."""
        if not self._on:
            return original(hidden, *args, **named)
        plain = hidden.data if hidden._is_view() else hidden  # a view of something is traced as another thing
        return compiled(hidden.shape[0] * hidden.shape[1], layer, plain, *args, **named)


def _compiled(function: Run, tuned: bool) -> Run:
    """Called with the number of rows first."""
    options = _SINGLE if tuned and BACKEND == "inductor" else None
    single = torch.compile(_own(function), backend=BACKEND, options=options, dynamic=False)
    several = torch.compile(_own(function), backend=BACKEND, dynamic=True)

    def run(rows: int, *args: Any, **named: Any) -> Any:
        return (single if rows == 1 else several)(*args, **named)

    return run


def _own(function: Any) -> Run:
    """The same as code of its own: of one that runs with sizes that differ, torch takes sizes to be unknown, and
    decoders of one class may differ."""
    made = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _repeated(decoder: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of its longest list of modules that consist of modules and are all of one class."""
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    alike = [one for one in lists if len({*map(type, one)}) == 1 and any(True for _ in one[0].children())]
    yield from max(alike, key=len, default=())

"""The layers of a decoder as compiled code, for steps of one token per sequence: one compilation for all of them.

What is compiled is the forward of the layers' class, with the layer as its first argument, so that its weights are
inputs of the code. It runs inside `active` alone: prompts, which come in all lengths, run layers as they are. Knows
modules; not what they compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.config import patch as dynamo_settings

Run = Callable[..., Any]
MOST_GRAPHS = 32  # of a class's forward: one row, any number of rows, and this for each width
# Weights are read at the memory's full speed for a single row.
_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True}


class CompiledLayers:
    """Of some decoders: the members of their lists of layers."""

    def __init__(self, *decoders: torch.nn.Module, backend: str = "inductor") -> None:
        self._on = False
        self._how: dict[str, Any] = {"backend": backend} | ({"options": _OPTIONS} if backend == "inductor" else {})
        kinds: dict[type, Run] = {}
        for layer in (layer for decoder in decoders for layer in _repeated(decoder)):
            forward = type(layer).forward
            kind = kinds.setdefault(type(layer), torch.compile(forward, **self._how))
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
        compiled = torch.compile(given, **self._how)

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


def _repeated(decoder: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The longest list of modules of one class."""
    lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len({*map(type, m)}) == 1]
    yield from max(lists, key=len, default=())

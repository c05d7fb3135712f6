"""The first call that a tiny pipeline makes of its denoiser: a model, and arguments that fit it."""

from __future__ import annotations

import functools
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polymux.testing.tiny import TINY, Ctx, make
from polymux.testing.tiny.driver import call_pipeline, open_pipeline


class _Reached(BaseException):
    """Nobody in a pipeline catches it."""


@dataclass(frozen=True)
class DenoiserCall:
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pipeline: Any = None

    @torch.no_grad()
    def run(self, module: torch.nn.Module | None = None) -> list[torch.Tensor]:
        """The tensors of the result. Arguments are copies: some models write into theirs."""
        args, kwargs = copied(self.args), copied(self.kwargs)
        return tensors_in((module or self.module)(*args, **kwargs))


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return type(value)(copied(item) for item in value) if isinstance(value, (list, tuple)) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def tiny_pipeline(name: str) -> Any:
    if TINY[name].kind == "modular":
        with tempfile.TemporaryDirectory() as folder:
            return open_pipeline(make(name, Path(folder)), Ctx(), TINY[name].load)
    torch.manual_seed(0)
    pipeline: Any = TINY[name].build(Ctx())
    pipeline.set_progress_bar_config(disable=True)
    for part, made in TINY[name].load.items():
        setattr(pipeline, part, made)
    return pipeline


def denoiser_call(name: str) -> DenoiserCall:
    """Of a tiny checkpoint."""
    pipeline = tiny_pipeline(name)
    module, found = pipeline.transformer.eval(), []

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        found.append(DenoiserCall(module, args, kwargs, pipeline))
        raise _Reached

    module.__dict__["forward"] = forward
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call_pipeline(pipeline, Ctx(), TINY[name].call)
    except _Reached:
        pass
    del module.__dict__["forward"]
    return found[0]


def difference(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert [t.shape for t in got] == [t.shape for t in wanted]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(got, wanted, strict=True))

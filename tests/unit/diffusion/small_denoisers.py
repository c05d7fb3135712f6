"""Denoisers that are small enough to be recorded, and engines with them, in which a tape stands for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fake_pipeline import Noting, engine_of, pipeline_of

from polymux.compilation_config import Compilation
from polymux.diffusion.call_graphs import CallGraphs
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.testing.tape import TapeRecorder

CPU = torch.device("cpu")
ON = Compilation(cudagraphs=True)
Forward = Callable[[torch.Tensor, torch.Tensor], Any]


class Small(Noting):
    """Whose Python runs only if it is not replayed."""

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor]:
        self.note(len(hidden_states))
        return (hidden_states * self.scale + timestep.reshape(-1, 1, 1) / 1024 + encoder_hidden_states[:, :1] / 64,)


class Simple(torch.nn.Module):
    """Of a function, with one weight."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return self.function(x * self.weight, extra)


def small_engine(settings: Compilation | None = ON, **knobs: Any) -> DiffusionEngine:
    pipeline = pipeline_of()
    pipeline.register_modules(transformer=Small())
    engine = engine_of(pipeline, max_batched_tokens=1 << 20, **knobs)
    if settings is not None:
        put_in(engine, settings)
    return engine


def put_in(engine: DiffusionEngine, settings: Compilation = ON) -> CallGraphs:
    """As on a GPU."""
    graphs = CallGraphs(settings, [c for c in engine.components if c.role == "denoiser"], CPU, TapeRecorder())
    engine.model = replace(engine.loaded, graphs=graphs)
    engine.runner.way = graphs
    return graphs


def add_one(x: torch.Tensor, extra: Any) -> Any:
    return (x + 1,)

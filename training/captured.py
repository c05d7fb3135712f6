"""A training step that is captured in a CUDA graph and replayed: the host sends one launch per step, not a thousand.

Small networks are limited by launches, not by arithmetic. The step reads and writes tensors that stay where they are,
draws its randomness from the device's default generator and never waits for the device. Without a GPU, or where the
capture fails, the step is simply called; the log says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from training.run import Run

Step = Callable[[], Tensor]
_WARM = 4  # calls before the capture: compilation, choice of convolution algorithms, the optimizer's state


class Repeated:
    """`step` returns one small tensor of numbers to log, which the next call may overwrite."""

    def __init__(self, name: str, step: Step, run: Run) -> None:
        self.name, self.step, self.run = name, step, run
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None
        self.wanted = run.graphs

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.graph is not None and self.result is not None:
            self.graph.replay()
            return self.result
        if self.wanted and self.calls > _WARM:
            return self._capture()
        if not self.wanted:
            return self.step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self.step()
        torch.cuda.current_stream().wait_stream(side)
        if self.calls == 1:
            torch.cuda.synchronize()
            self.run.log(f"{self.name}: first step done")
        return result

    def prepare(self) -> None:
        """Compile and capture ahead of time. The steps are real ones: the learning rate should be zero."""
        while self.wanted and self.graph is None:
            self()

    def _capture(self) -> Tensor:
        """The capture itself computes nothing, so the graph is replayed at once."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self.result = self.step()
        except RuntimeError as error:  # what cannot be captured says so in many ways, all of them this class
            self.wanted, self.result = False, None
            self.run.trouble(f"{self.name}: NO CUDA GRAPH, every step is launched piecemeal: {str(error)[:300]}")
            torch.cuda.synchronize()
            return self.step()
        self.graph = graph
        graph.replay()
        self.run.log(f"{self.name}: captured")
        return self.result

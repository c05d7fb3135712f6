"""Frames as CUDA graphs: what the talker does for a frame, recorded once for so many rows, and run without Python.

A graph reads and writes tensors that stay where they are; so the rows of a call are put into these, at their places,
and the other rows are computed for nobody. Where recording fails, frames run one operation after the other, as on a
CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from polymux.models.qwen3_tts.places import Places

Tensor = torch.Tensor
Step = Callable[..., tuple[Tensor, ...]]
Rows = tuple[Tensor, ...]

log = logging.getLogger(__name__)


class FixedFrame:
    """Of the first `rows` places. `step`: of positions (rows) and inputs, all for these places in their order. `idle`:
    the position that is nobody's."""

    def __init__(self, step: Step, rows: int, idle: int, like: Rows, pool: Any) -> None:
        self._idle = idle
        self._inputs = tuple(x.new_ones(rows, *x.shape[1:]) for x in like)
        self._positions = torch.full((rows,), idle, device=like[0].device)
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made: Rows = ()
        if like[0].is_cuda:
            self._graph, self._made = self._recorded(pool)

    def run(self, places: Tensor, positions: Tensor, inputs: Rows) -> Rows:
        """What the step makes for these places."""
        self._positions.fill_(self._idle)
        self._positions[places] = positions
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine[places] = given
        if self._graph is None:
            self._made = self._step(self._positions, *self._inputs)
        else:
            self._graph.replay()
        return tuple(made[places] for made in self._made)

    def _recorded(self, pool: Any) -> tuple[torch.cuda.CUDAGraph, Rows]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is chosen or allocated at the first run must not be recorded
            self._step(self._positions, *self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            made = self._step(self._positions, *self._inputs)
        return graph, made


class Graphs:
    """Those of one talker, as long as its weights and places are where they were."""

    def __init__(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        self._weights, self._listed = weights, list[Tensor]()
        self._known: dict[tuple[int, int], FixedFrame] = {}
        self._where: tuple[int, ...] = ()
        self._pool: Any = None
        self.broken = False  # recording has failed

    def forget(self) -> None:
        """Drop what is recorded."""
        self._known.clear()
        self._where, self._pool = (), None  # memory of graphs that are gone is not recorded into again

    def frame(self, step: Step, places: Places, rows: int, length: int, like: Rows) -> FixedFrame | None:
        """For the first `rows` places that look at `length` positions; None: it cannot be recorded."""
        self._listed = self._listed or list(self._weights())  # not before: loading puts others in their place
        where = tuple(x.data_ptr() for x in (*self._listed, *places.keys, *places.values))
        if where != self._where:
            self.forget()
            self._where = where
        if (rows, length) not in self._known and not self.broken:
            try:
                self._pool = self._pool or (torch.cuda.graph_pool_handle() if like[0].is_cuda else None)
                self._known[rows, length] = FixedFrame(step, rows, places.positions - 1, like, self._pool)
            except RuntimeError as error:  # of torch or CUDA, which may refuse anything that is recorded
                log.warning("frames cannot be recorded as a CUDA graph (%s): they run without", error)
                self.broken = True
        return self._known.get((rows, length))


def power_of_two(count: int) -> int:
    """The least one that is not below."""
    return 1 << max(count - 1, 0).bit_length()

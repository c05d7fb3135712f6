"""The step of one token per sequence, in buffers that stay where they are; on a GPU as a graph that is only replayed.

A batch is filled up to one of a few sizes with tokens that belong to nobody. Without graphs there are no such tokens:
each size runs as it is. Knows the network as a function; not whose tokens these are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal

import torch

from polymux.ar.network import Network
from polymux.ar.paged_cache import PagedCache, Steps
from polymux.errors import ConfigError

log = getLogger(__name__)

Graphs = Literal["compiled", "plain", "padded", "off"]
WARM = 2  # runs before a capture
STAGES = 3  # of buffers on the host: what is copied to the device is not overwritten before it has got there


@dataclass
class _Size:
    """One size of a batch: (positions, rows, slots) of its tokens, and their logits once it is captured."""

    packed: torch.Tensor  # (3, tokens)
    staged: list[torch.Tensor]
    turn: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None

    @property
    def steps(self) -> Steps:
        return Steps(*self.packed.unbind(0))

    def fill(self, positions: list[int], rows: list[int], slots: list[int], nobody: int) -> None:
        """Those that are missing stand at the begin of nobody's row, and are kept where nobody looks."""
        missing = self.packed.shape[1] - len(rows)
        self.turn = (self.turn + 1) % STAGES
        staged = self.staged[self.turn]
        staged.numpy()[:] = (positions + [0] * missing, rows + [nobody] * missing, slots + [0] * missing)
        self.packed.copy_(staged, non_blocking=True)


class StepGraphs:
    """`last` (rows): the token that each row goes on with. Mode `padded`: all that graphs need, and none. `needed`:
    what cannot be captured is an error, since others have captured it, and will not wait."""

    def __init__(
        self, network: Network, cache: PagedCache, last: torch.Tensor, mode: Graphs, needed: bool = False
    ) -> None:
        self._cache, self._last, self._mode, self._needed = cache, last, mode, needed
        self._network: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor] = (
            network.compiled if mode == "compiled" else network
        )
        self._sizes: dict[int, _Size] = {}
        self._captures = mode in ("compiled", "plain") and cache.device.type == "cuda"
        self._pool: Any = None

    @property
    def sizes(self) -> list[int]:
        """That batches are filled up to."""
        most = self._cache.rows
        return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

    def prepare(self) -> None:
        """Capture all sizes: the largest first, in whose memory the others have room."""
        if not self._captures:
            return
        start = time.perf_counter()
        try:
            for size in reversed(self.sizes):
                self._size(size)
        except RuntimeError as error:  # what a device or its libraries say to a capture
            if self._needed:
                what = f"steps of several ranks cannot be captured (--decode-graphs off): {error}"
                raise ConfigError(what, param="decode_graphs") from error
            log.warning("steps are not captured, and run kernel by kernel: %s", str(error).partition("\n")[0])
            self._captures, self._mode = False, "off"
            self._sizes.clear()
            return
        log.info("captured steps of %s sequences in %.1f s", self.sizes, time.perf_counter() - start)

    def run(self, positions: list[int], rows: list[int], slots: list[int]) -> torch.Tensor:
        """Logits (tokens, vocabulary); to be used before the next run."""
        wanted = len(rows)
        fitting = wanted if self._mode == "off" else next(size for size in self.sizes if size >= wanted)
        size = self._size(fitting)
        size.fill(positions, rows, slots, nobody=self._cache.rows)
        if size.graph is None:
            return self._step(size.steps)[:wanted]
        size.graph.replay()
        assert size.logits is not None
        return size.logits[:wanted]

    def _size(self, tokens: int) -> _Size:
        if tokens not in self._sizes:
            pinned = self._cache.device.type == "cuda"
            packed = torch.zeros(3, tokens, dtype=torch.long, device=self._cache.device)
            staged = [torch.zeros(3, tokens, dtype=torch.long, pin_memory=pinned) for _ in range(STAGES)]
            size = self._sizes[tokens] = _Size(packed, staged)
            if self._captures:
                size.fill([], [], [], nobody=self._cache.rows)
                self._capture(size)
        return self._sizes[tokens]

    def _capture(self, size: _Size) -> None:
        steps = size.steps
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self._step(steps)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others prepare inputs
            size.logits = self._step(steps)
        self._pool = graph.pool()
        size.graph = graph

    def _step(self, steps: Steps) -> torch.Tensor:
        cache = self._cache
        cache.batch = steps
        cache.table[steps.rows, steps.positions // cache.block_size] = (steps.slots // cache.block_size).int()
        return self._network(self._last[steps.rows], steps.positions, 0, cache.handle)

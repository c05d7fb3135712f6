"""The step of one token per sequence, in buffers that stay where they are; on a GPU as a graph that is only replayed.

A batch is filled up to one of a few sizes with tokens that belong to nobody. Without graphs there are no such tokens:
each size runs as it is. Knows the network as a function; not whose tokens these are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal, Protocol

import torch

from polymux.ar.layers import CompiledLayers
from polymux.ar.paged_cache import PagedCache, Steps
from polymux.errors import ConfigError

log = getLogger(__name__)

Read = Callable[[torch.Tensor, torch.Tensor, Any, int], tuple[torch.Tensor, torch.Tensor | None]]
Graphs = Literal["compiled", "plain", "padded", "off"]
WARM = 2  # runs before a capture
STAGES = 3  # of buffers on the host: what is copied to the device is not overwritten before it has got there


def sizes_of(most: int) -> list[int]:
    """Of batches that are recorded: 1, 2, 4, ... and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


class Stepped(Protocol):
    """A network, as a step runs it: tokens and their positions to a row of numbers for each."""

    @property
    def layers(self) -> CompiledLayers: ...

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, keep: Any, cache: int) -> torch.Tensor: ...


@dataclass
class _Size:
    """One size of a batch: (positions, rows, slots, where they stand for the network) of its tokens, and their logits
    once it is captured; and states, of a network that is listened to."""

    packed: torch.Tensor  # (4, tokens)
    staged: list[torch.Tensor]
    turn: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None
    states: torch.Tensor | None = None

    @property
    def steps(self) -> Steps:
        return Steps(*self.packed[:3].unbind(0))

    def fill(self, positions: list[int], rows: list[int], slots: list[int], stand: list[int], nobody: int) -> None:
        """Those that are missing stand at the begin of nobody's row, and are kept where nobody looks."""
        missing = self.packed.shape[1] - len(rows)
        self.turn = (self.turn + 1) % STAGES
        staged = self.staged[self.turn]
        nothing = [0] * missing
        staged.numpy()[:] = (positions + nothing, rows + [nobody] * missing, slots + nothing, stand + nothing)
        self.packed.copy_(staged, non_blocking=True)


class StepGraphs:
    """`last` (rows): the token that each row goes on with. Mode `padded`: all that graphs need, and none. `states`: of
    the last run, to be used before the next one; if the network is listened to."""

    def __init__(
        self,
        network: Stepped,
        cache: PagedCache,
        last: torch.Tensor,
        mode: Graphs,
        read: Read | None = None,
        needed: bool = False,
    ) -> None:
        """`read`: the same as the network, and states beside logits; None: nobody wants them. `needed`: what cannot be
        captured is an error, since others have captured it, and will not wait."""
        self._cache, self._last, self._mode, self._needed = cache, last, mode, needed
        self._network, self._read = network, read
        self.states: torch.Tensor | None = None
        self._sizes: dict[int, _Size] = {}
        self._captures = mode in ("compiled", "plain") and cache.device.type == "cuda"
        self._pool: Any = None

    @property
    def sizes(self) -> list[int]:
        """That batches are filled up to."""
        return sizes_of(self._cache.rows)

    def prepare(self) -> None:
        """Capture all sizes: the largest first, in whose memory the others have room."""
        if not self._captures:
            return
        start = time.perf_counter()
        for size in reversed(self.sizes):
            self._size(size)
        if not self._captures:
            return
        log.info("captured steps of %s sequences in %.1f s", self.sizes, time.perf_counter() - start)

    def run(
        self, positions: list[int], rows: list[int], slots: list[int], stand: list[int] | None = None
    ) -> torch.Tensor:
        """Logits (tokens, vocabulary); to be used before the next run. `stand`: where the tokens stand for the network,
        if not at their positions."""
        wanted = len(rows)
        fitting = wanted if self._mode == "off" else next(size for size in self.sizes if size >= wanted)
        size = self._size(fitting)
        size.fill(positions, rows, slots, positions if stand is None else stand, nobody=self._cache.rows)
        if size.graph is None:
            self._step(size)
        else:
            size.graph.replay()
        self.states = size.states
        assert size.logits is not None
        return size.logits[:wanted]

    def _size(self, tokens: int) -> _Size:
        if tokens not in self._sizes:
            pinned = self._cache.device.type == "cuda"
            packed = torch.zeros(4, tokens, dtype=torch.long, device=self._cache.device)
            staged = [torch.zeros(4, tokens, dtype=torch.long, pin_memory=pinned) for _ in range(STAGES)]
            size = self._sizes[tokens] = _Size(packed, staged)
            if self._captures:
                self._try_capture(size)
        return self._sizes[tokens]

    def _try_capture(self, size: _Size) -> None:
        """If it cannot be, as fewer and fewer things are tried, it has no graph."""
        size.fill([], [], [], [], nobody=self._cache.rows)
        while self._captures:
            try:
                self._capture(size)
                return
            except RuntimeError as error:  # what a compiler, a device or its libraries say to it
                what = str(error).strip().partition("\n")[0]
                if self._needed:
                    message = f"steps of several ranks cannot be captured (--decode-graphs off): {what}"
                    raise ConfigError(message, param="decode_graphs") from error
                if self._mode == "compiled":
                    log.warning("layers are not compiled: %s", what)
                    self._mode = "plain"
                else:
                    log.warning("steps are not captured, and run kernel by kernel: %s", what)
                    self._captures, self._mode = False, "off"

    def _capture(self, size: _Size) -> None:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self._step(size)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others prepare inputs
            self._step(size)
        self._pool = graph.pool()
        size.graph = graph

    def _step(self, size: _Size) -> None:
        cache, steps, stand = self._cache, size.steps, size.packed[3]
        cache.batch = steps
        cache.table[steps.rows, steps.positions // cache.block_size] = (steps.slots // cache.block_size).int()
        with self._network.layers.active() if self._mode == "compiled" else nullcontext():
            if self._read is None:
                size.logits = self._network(self._last[steps.rows], stand, 0, cache.handle)
            else:
                size.logits, size.states = self._read(self._last[steps.rows], stand, 0, cache.handle)

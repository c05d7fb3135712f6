"""Outputs on their way out: copied to the host and converted in a thread, while the engine works on other requests.

What the engine's thread takes from here is bounded: a request whose chunks are not used up gets no further ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

from polymux.diffusion.host_copy import HostCopy
from polymux.diffusion.outputs import RawOutput, media_of
from polymux.request import ArrayData, Media, OutputChunk

WINDOW = 4  # chunks of a request that may be under way
PARTS = 2  # of frames that are decoded and not yet converted


class Dropped(Exception):
    """Nobody waits for this output any more."""


class Outbound:
    """One output. Everything but `put` is for the engine's thread."""

    def __init__(self, request_id: str, output: int) -> None:
        self.request_id = request_id
        self.output = output
        self.dropped = False
        self.chunks: deque[OutputChunk] = deque()
        self.media: Future[list[Media]] = Future()

    def put(self, medium: int, shape: tuple[int, ...], start: int, rows: ArrayData) -> None:
        if self.dropped:
            raise Dropped
        self.chunks.append(OutputChunk(self.request_id, self.output, medium, shape, start, rows))

    def take(self, most: int) -> list[OutputChunk]:
        return [self.chunks.popleft() for _ in range(min(most, len(self.chunks)))]

    @property
    def empty(self) -> bool:
        """Whether all chunks are taken, and `media` tells how it ended."""
        return self.media.done() and not self.chunks  # in this order: a chunk is put before the end is told

    def drop(self) -> None:
        self.dropped = True
        self.media.cancel()
        self.chunks.clear()


class FrameStream(Protocol):
    """The frames of one output, taken while others are still decoded. For the engine's thread; a FrameSink."""

    outbound: Outbound

    def put(self, frames: torch.Tensor, start: int, count: int) -> None: ...

    def end(self) -> None:
        """No more will come."""
        ...


class ConvertedStream:
    """A FrameStream whose frames are converted in a thread."""

    def __init__(self, outbound: Outbound, copy: HostCopy, pool: ThreadPoolExecutor) -> None:
        self.outbound, self._copy, self._pool = outbound, copy, pool
        self._parts: deque[Future[None]] = deque()

    def put(self, frames: torch.Tensor, start: int, count: int) -> None:
        """Waits if several parts are under way, so that no more are in memory. Raises what became of them."""
        while len(self._parts) >= PARTS:
            self._parts.popleft().result()
        shape = (count, *frames.shape[2:], frames.shape[1])
        after, outbound = self._copy.mark(), self.outbound
        self._parts.append(
            self._pool.submit(
                self._copy.part, frames, after, lambda row, rows: outbound.put(0, shape, start + row, rows)
            )
        )

    def end(self) -> None:
        parts = list(self._parts)

        def outcome() -> list[Media]:
            for part in parts:
                part.result()
            return []

        self.outbound.media = self._pool.submit(outcome)


class Outputs(Protocol):
    """What becomes of an engine's outputs."""

    chunk_bytes: int

    def stream(self, request_id: str, output: int) -> FrameStream:
        """For an output whose frames come one part after the other."""
        ...

    def send(self, request_id: str, output: int, raw: RawOutput, at_once: bool) -> Outbound:
        """`at_once`: in this thread, and not in chunks."""
        ...

    def wait(self, outbounds: Iterable[Outbound], seconds: float) -> None:
        """Until one more of them has ended, or so long. Those that have may wait for their consumers."""
        ...

    def close(self) -> None: ...


class OutputThread:
    """The thread, one per engine; and a second one for frames that leave while others are decoded. For those the engine
    waits, so they wait for nothing else."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._copy, self._frame_copy = HostCopy(device, chunk_bytes), HostCopy(device, chunk_bytes)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outputs")
        self._frame_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="frames")

    def stream(self, request_id: str, output: int) -> FrameStream:
        return ConvertedStream(Outbound(request_id, output), self._frame_copy, self._frame_pool)

    def send(self, request_id: str, output: int, raw: RawOutput, at_once: bool) -> Outbound:
        outbound = Outbound(request_id, output)
        if not at_once:
            outbound.media = self._pool.submit(self._job(raw, outbound))
            return outbound
        try:
            outbound.media.set_result(media_of(raw))
        except Exception as error:  # told where all other outputs' ends are told
            outbound.media.set_exception(error)
        return outbound

    def wait(self, outbounds: Iterable[Outbound], seconds: float) -> None:
        copying = [outbound.media for outbound in outbounds if not outbound.media.done()]
        if copying:
            wait(copying, seconds, FIRST_COMPLETED)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._frame_pool.shutdown(cancel_futures=True)

    def _job(self, raw: RawOutput, outbound: Outbound) -> Callable[[], list[Media]]:
        after, held = self._copy.mark(), [raw]

        def run() -> list[Media]:
            # Popped: when the copy is there, nothing but it is in memory.
            return [] if outbound.dropped else self._copy.run(held.pop(), after, outbound.put)

        return run

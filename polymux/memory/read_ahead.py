"""Threads that fill a ring of buffers with the bytes of the coming blocks, in the order in which they are expected.

One thread, the owner, asks for blocks; only it decides what is read next, so nothing here needs a lock. A block that
was not expected is answered all the same: what was read ahead is dropped. The readers' threads know nothing of the
device: a buffer comes to them when it has left. (Several threads that ask the driver about events hold up each other,
and the one that sends.)
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from polymux.memory.byte_source import ByteSource


@dataclass(eq=False)
class Buffer:
    """Host memory for one piece. It may be filled again once its last transfer, `sent`, has happened."""

    bytes: torch.Tensor  # uint8
    sent: torch.cuda.Event | None = None

    @property
    def left(self) -> bool:
        return self.sent is None or self.sent.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.sent is not None:
            self.sent.synchronize()


@dataclass(eq=False)
class Piece:
    """A part of a block's image, in a buffer or on its way into it."""

    index: int
    offset: int
    nbytes: int
    buffer: Buffer
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def memory(self) -> torch.Tensor:
        return self.buffer.bytes[: self.nbytes]


class ReadAhead:
    """All but the constructor is called by the owner's thread. Leaving the block ends the threads."""

    def __init__(self, source: ByteSource, buffers: Sequence[Buffer], threads: int) -> None:
        self._source = source
        self._piece_bytes = buffers[0].bytes.numel()
        self._free = deque(buffers)
        self._leaving: deque[Buffer] = deque()  # on their way to the device, in order
        self._ring: deque[Piece] = deque()  # the pieces that have a buffer, in order
        self._todo: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()  # those of them that no thread has begun
        self._order: tuple[int, ...] = ()
        self._coming: Iterator[tuple[int, int, int]] = iter(())
        self._threads = [
            threading.Thread(target=self._read_all, name=f"polymux-stage-{i}", daemon=True) for i in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def expect(self, order: Sequence[int]) -> None:
        """Read round these blocks from now on, from the first one."""
        sizes = self._source.layout.blocks
        self._order = tuple(index for index in order if sizes[index].nbytes)
        self._read_from(0)

    def pieces(self, index: int) -> Iterator[Piece]:
        """A block's pieces, each once it is read. Its buffer is used again when the next one is asked for."""
        count = sum(1 for _ in self._cut(index))
        if count and not (self._ring and (self._ring[0].index, self._ring[0].offset) == (index, 0)):
            self._read_next(index)
        for _ in range(count):
            if not self._ring:
                self._leaving[0].wait()
                self._refill()
            piece = self._ring[0]
            piece.done.wait()
            if piece.error is not None:
                self._drop()
                raise piece.error
            yield piece
            self._leaving.append(self._ring.popleft().buffer)
            self._refill()

    def _read_next(self, index: int) -> None:
        """Begin with this block, and go on with what is expected behind it."""
        if index in self._order:
            self._read_from(self._order.index(index))
        else:
            self._read_from(0, first=(index,))

    def _read_from(self, position: int, first: tuple[int, ...] = ()) -> None:
        self._drop()
        order = self._order[position:] + self._order[:position]
        blocks = itertools.chain(first, itertools.cycle(order))
        self._coming = ((index, offset, nbytes) for index in blocks for offset, nbytes in self._cut(index))
        self._refill()

    def _cut(self, index: int) -> Iterator[tuple[int, int]]:
        """Offset and size of each of a block's pieces."""
        size = self._source.layout.blocks[index].nbytes
        return ((at, min(self._piece_bytes, size - at)) for at in range(0, size, self._piece_bytes))

    def _refill(self) -> None:
        """Give every buffer that is free by now something to hold."""
        while self._leaving and self._leaving[0].left:
            self._free.append(self._leaving.popleft())
        for index, offset, nbytes in itertools.islice(self._coming, len(self._free)):
            piece = Piece(index, offset, nbytes, self._free.popleft())
            self._ring.append(piece)
            self._todo.put(piece)

    def _drop(self) -> None:
        """Forget what was read ahead, and wait until no thread is at it."""
        self._coming = iter(())
        unread: set[Piece] = set()
        while True:
            try:
                unread.add(self._todo.get_nowait())  # type: ignore[arg-type]  # None is put when all is over
            except queue.Empty:
                break
        for piece in self._ring:
            if piece not in unread:
                piece.done.wait()
        self._free.extend(piece.buffer for piece in self._ring)
        self._ring.clear()

    # The readers' threads.

    def _read_all(self) -> None:
        while (piece := self._todo.get()) is not None:
            try:
                self._source.read(piece.index, piece.offset, piece.memory)
            except Exception as error:  # raised again in the owner's thread, which must not wait forever
                piece.error = error
            piece.done.set()

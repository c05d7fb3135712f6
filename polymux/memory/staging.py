"""Block streaming from memory that the device cannot read at full speed: page cache, mapped files, pageable memory.

Worker threads read pieces of the coming blocks into a ring of pinned buffers ahead of time; one more thread sends each
piece to its slot as soon as it is there and the slot is free. So reading, transfer and computation overlap, and the
pinned memory needed is a few pieces, not a block. On a CPU the same threads run with plain memory.

Knows nothing of what computes, nor where the bytes come from.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from polymux.memory.base import PAGE, Layout
from polymux.memory.byte_source import ByteSource
from polymux.memory.layout import align
from polymux.memory.pinned import PinnedBuffer
from polymux.memory.read_ahead import Buffer, Piece, ReadAhead


@dataclass(frozen=True)
class StagingSettings:
    """A piece keeps a thread busy for a millisecond, and all of them fit into the processor's cache until the device
    has read them: by way of main memory, every byte would pass three times. The spare pieces are those on the bus while
    every thread reads."""

    piece_bytes: int = 8 * 2**20
    threads: int = field(default_factory=lambda: max(1, min(12, len(os.sched_getaffinity(0)) - 1)))
    spare_pieces: int = 4

    @property
    def pieces(self) -> int:
        return self.threads + self.spare_pieces


@dataclass(eq=False)
class Delivery:
    """A block on its way to a slot. Is the `base.Arrival` of a fetch."""

    index: int
    slot: torch.Tensor
    free: torch.cuda.Event | None
    sent: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None
    error: Exception | None = None

    def wait(self) -> None:
        """The device may still be copying, but all that it has to copy must be in its queue: until then the thread
        waits, since a stream cannot be told to wait for what is not recorded."""
        self.sent.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            torch.cuda.current_stream(self.slot.device).wait_event(self.event)


class StagedBlocks:
    """Implements `base.HostBlocks`."""

    collective = False

    def __init__(self, source: ByteSource, device: torch.device, settings: StagingSettings | None = None) -> None:
        self._source = source
        self._settings = settings or StagingSettings()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._orders: queue.SimpleQueue[Delivery | Sequence[int] | None] = queue.SimpleQueue()
        size = min(self._settings.piece_bytes, align(max(1, source.layout.largest), PAGE))
        self._memory = PinnedBuffer(size * self._settings.pieces)
        if self._stream is not None:
            self._memory.tensor.zero_()
            self._memory.pin()
        buffers = [Buffer(part) for part in torch.split(self._memory.tensor, size)]
        self._reader = ReadAhead(source, buffers, self._settings.threads)
        self._sender = threading.Thread(target=self._serve, name="polymux-send", daemon=True)
        self._sender.start()

    @property
    def layout(self) -> Layout:
        return self._source.layout

    @property
    def slot_bytes(self) -> int:
        return self.layout.largest

    @property
    def description(self) -> str:
        mib = self._memory.nbytes / 2**20
        return f"{self._source.description}, staged by {self._settings.threads} threads through {mib:.0f} MiB"

    def expect(self, order: Sequence[int]) -> None:
        self._orders.put(tuple(order))

    def fetch(self, index: int, slot: torch.Tensor, free: torch.cuda.Event | None) -> Delivery:
        delivery = Delivery(index, slot, free)
        self._orders.put(delivery)
        return delivery

    def close(self) -> None:
        self._orders.put(None)
        self._sender.join()
        if self._stream is not None:
            self._stream.synchronize()
        self._source.close()
        self._memory.close()

    # The sender's thread: it alone decides what is read.

    def _serve(self) -> None:
        with self._reader:
            while (order := self._orders.get()) is not None:
                if not isinstance(order, Delivery):
                    self._reader.expect(order)
                    continue
                try:
                    self._send(order)
                except Exception as error:  # raised again in the thread that waits, which must not wait forever
                    order.error = error
                order.sent.set()

    @torch.no_grad()
    def _send(self, delivery: Delivery) -> None:
        if self._stream is None:
            for piece in self._reader.pieces(delivery.index):
                _target(delivery, piece).copy_(piece.memory)
            return
        with torch.cuda.stream(self._stream):
            if delivery.free is not None:
                self._stream.wait_event(delivery.free)
            for piece in self._reader.pieces(delivery.index):
                _target(delivery, piece).copy_(piece.memory, non_blocking=True)
                piece.buffer.sent = self._stream.record_event(piece.buffer.sent)
            delivery.event = self._stream.record_event()


def _target(delivery: Delivery, piece: Piece) -> torch.Tensor:
    return delivery.slot[piece.offset : piece.offset + piece.nbytes]

"""A socket pair between rank 0 of a stage and another one of its ranks: messages, and the watch over each other.

The end of the stream tells that the other process is gone, and silence that it hangs: each end sends a beat every
second, from a thread of its own. What becomes of a stage that has lost a rank is not decided here.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from polymux.engine.rank_messages import Beat
from polymux.errors import PolymuxError, StageDeadError, from_info
from polymux.messages import LENGTH, Fatal

BEAT_S = 1.0
SILENT_BEATS = 7  # in a row, before a silent process counts as one that hangs

Message = TypeVar("Message")


class Link(Generic[Message]):
    """One end. `lost` is called once, in a thread, with what has become of the other end."""

    def __init__(
        self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Message], lost: Callable[[PolymuxError], None]
    ) -> None:
        os.set_inheritable(end.fileno(), False)
        self._socket, self._decoder, self._lost = end, decoder, lost
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._watching, self._done = False, threading.Event()
        for work in (self._read, self._beat):
            threading.Thread(target=work, name="rank link", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(framed(message))

    def send_frame(self, data: bytes) -> None:
        """To an end that is gone it does nothing: the reader notices."""
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            return

    def receive(self) -> Message:
        """The next message; waits for it."""
        return self._inbox.get()

    def watch(self) -> None:
        """From now on silence counts. Before, the other process loads libraries and weights, which may hold it up."""
        self._watching = True

    def close(self) -> None:
        """From now on the other end may go."""
        self._done.set()

    def _beat(self) -> None:
        beat = framed(Beat())
        while not self._done.wait(BEAT_S):
            self.send_frame(beat)

    def _read(self) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
                message = self._decoder.decode(self._exactly(length))
                if isinstance(message, Fatal):
                    raise from_info(message.error)
                if not isinstance(message, Beat):
                    self._inbox.put(message)
        except (PolymuxError, msgspec.DecodeError) as error:
            if not self._done.is_set():
                self._lost(error if isinstance(error, PolymuxError) else StageDeadError(f"sent what is none: {error}"))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done, silent = memoryview(data), 0, 0
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while done < size:
            # Counted in waits and not by the clock: if it is this process that was stopped, it has waited but once.
            while not poller.poll(BEAT_S * 1000):
                silent += 1
                if silent > SILENT_BEATS and self._watching:
                    raise StageDeadError(f"has given no sign of life for {SILENT_BEATS * BEAT_S:g} s")
            try:
                count = self._socket.recv_into(view[done:])
            except OSError:
                count = 0
            if count == 0:
                raise StageDeadError("is gone")
            done, silent = done + count, 0
        return data


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body

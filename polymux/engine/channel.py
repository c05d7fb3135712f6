"""The stage's end of the socket to the API process: an inbox, an outbox, and the watch over the parent.

Two threads, so that neither a long step nor a slow reader holds the other side up. When the parent is gone, this
process and what it started end at once, whatever they are doing. Knows messages, not what they mean.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import threading
from typing import NoReturn

import msgspec

from polymux.messages import LENGTH, FromStage, ToStage, frame, to_stage

WATCH_MS = 1000


class Channel:
    """One per stage process; takes over the file descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # a child that holds the socket open would hide our end from the parent
        self._socket = socket.socket(fileno=fd)
        self._parent = os.getppid()
        self._inbox: queue.SimpleQueue[ToStage | msgspec.DecodeError] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def receive(self, *, block: bool) -> ToStage | None:
        """The next message; None if there is none and `block` is false. Raises DecodeError for what is no message."""
        try:
            message = self._inbox.get(block=block)
        except queue.Empty:
            return None
        if isinstance(message, msgspec.DecodeError):
            raise message
        return message

    def send(self, message: FromStage) -> None:
        """Never blocks. Raises PayloadTooLargeError."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """A message as it came from another process."""
        self._outbox.put(data)

    def close(self) -> None:
        """Returns when all that was sent is out."""
        self._outbox.put(None)
        self._writer.join()

    def _read(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size, poller))
            body = self._exactly(length, poller)
            try:
                self._inbox.put(to_stage.decode(body))
            except msgspec.DecodeError as error:
                self._inbox.put(error)

    def _exactly(self, size: int, poller: select.poll) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            # The end of the stream tells at once that the parent is gone, unless a forked child of it still holds the
            # other end; therefore also look who the parent is.
            while not poller.poll(WATCH_MS):
                if os.getppid() != self._parent:
                    vanish()
            try:
                count = self._socket.recv_into(view[done:])
            except OSError:
                count = 0
            if count == 0:
                vanish()
            done += count
        return data

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError:
                vanish()


def vanish() -> NoReturn:
    """End at once, with all processes that this one started if it leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

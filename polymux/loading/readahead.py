"""Read weight files ahead of the libraries that map them, by several threads.

A mapped file is read page by page as it is touched, by one thread: a fraction of what disks and network file systems
give. The threads here read the same files in large pieces and throw the bytes away; what stays is the kernel's page
cache, where the mapping finds them. Knows nothing of what is in the files, and changes nothing about what is loaded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

THREAD_NAME = "polymux-read"
PIECE = 16 * 2**20  # bytes: smaller pieces cost more time than they share out, larger ones leave threads without work


class Piece(NamedTuple):
    file: Path
    offset: int


def pieces_of(file: Path) -> list[Piece]:
    return [Piece(file, offset) for offset in range(0, file.stat().st_size, PIECE)]


class ReadAhead:
    """Threads that read queued files, first come first served. With 0 threads nothing is read.

    Leaving the block waits until all that was queued is read, so that no thread outlives loading; after an error what
    is not read yet is dropped.
    """

    def __init__(self, threads: int) -> None:
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read_pieces, name=f"{THREAD_NAME}-{i}", daemon=True) for i in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop.set()
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()

    def queue(self, files: Iterable[Path]) -> None:
        if self._threads:
            for file in files:
                for piece in pieces_of(file):
                    self._pieces.put(piece)

    def _read_pieces(self) -> None:
        buffer = memoryview(bytearray(PIECE))
        with ExitStack() as opened:
            stream: FileIO | None = None
            while (piece := self._pieces.get()) is not None:
                if self._stop.is_set():
                    continue
                try:
                    if stream is None or stream.name != piece.file:
                        opened.close()
                        stream = opened.enter_context(FileIO(piece.file))
                    stream.seek(piece.offset)
                    stream.readinto(buffer)
                except OSError:
                    stream = None  # the library meets the same error, and there it can be reported

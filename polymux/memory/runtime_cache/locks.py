"""File locks that the kernel releases when their holder dies.

They are `flock` locks: they belong to the open file, not to the process, so a duplicated descriptor (the one that a
memory mapping keeps) holds the lock on, and closing another descriptor of the same file does not drop it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


def try_lock(fd: int, *, shared: bool) -> bool:
    """Lock an open file without waiting; False if somebody else's lock is in the way. Raises OSError."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def is_still_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one at `path`: it may have been removed or replaced since it was opened."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


class LockFile:
    """A file whose only purpose is to be locked, and to say who holds it and how the last holder fared."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock, waiting for it if need be. False if time ran out. Raises OSError."""
        deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not self._try():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        return True

    def _try(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if try_lock(fd, shared=False) and is_still_at(fd, self.path):
            self._fd = fd
            return True
        os.close(fd)
        return False

    def note(self, text: str) -> None:
        """Leave a line for those who wait. Only the holder may; it is advice, so a full disk does no harm."""
        assert self._fd is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)

    def read_note(self) -> str:
        """What the last holder left; empty if there is nothing."""
        try:
            return self.path.read_text(errors="replace")
        except OSError:
            return ""

    def release(self, *, remove: bool = False) -> None:
        """Give the lock up; twice does no harm."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(fd)

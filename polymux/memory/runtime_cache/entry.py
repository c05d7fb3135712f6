"""One entry of the cache, open: checked, and held against removal for as long as it is open or mapped.

What is always checked: the manifest's own digest, that it is of the identity asked for, the weight file's size, its
header's digest, and that the header is what its list of tensors makes. `damaged_blocks` reads all the rest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from polymux.errors import CacheError
from polymux.memory.runtime_cache.layout import MAX_HEADER, FileLayout, PlacedBlock
from polymux.memory.runtime_cache.locks import is_still_at, try_lock
from polymux.memory.runtime_cache.manifest import MANIFEST, WEIGHTS, Manifest, read_manifest

_PIECE = 16 * 2**20  # bytes read at a time
_PATIENCE_S, _PAUSE_S = 2.0, 0.01  # how long to wait for somebody who looks at an entry, or who is removing it

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no waiting for a pipe


@dataclass(frozen=True)
class Entry:
    """`file` are the weights, open for reading and locked; a mapping of them keeps the lock after `close`."""

    path: Path
    manifest: Manifest
    layout: FileLayout
    file: io.FileIO

    @classmethod
    def open(cls, path: Path, *, touch: bool) -> Entry | None:
        """The entry at `path`, None if there is none. `touch`: remember that it was used.

        Raises CacheError if there is one that cannot be used.
        """
        with ExitStack() as stack:
            file = _open_locked(path, stack)
            if file is None:
                return None
            manifest = read_manifest(path / MANIFEST)
            if manifest.identity.digest != path.name:
                raise CacheError(f"{path}: holds the weights of another identity, {manifest.identity.digest}")
            layout = _checked_layout(path / WEIGHTS, file.fileno(), manifest)
            if touch:
                with contextlib.suppress(OSError):  # a cache that may only be read has no order of use
                    os.utime(path / MANIFEST)
            stack.pop_all()
            return cls(path, manifest, layout, file)

    def damaged_blocks(self, threads: int) -> list[str]:
        """Read the whole file and name the blocks whose digest does not fit, in order."""
        with ThreadPoolExecutor(threads, thread_name_prefix="polymux-verify") as pool:
            found = pool.map(self._digest, self.layout.placed)
            pairs = zip(found, self.manifest.blocks_sha256, strict=True)
            return [name for digest, (name, expected) in pairs if digest != expected]

    def _digest(self, block: PlacedBlock) -> str:
        digest = hashlib.sha256()
        for at in range(0, block.nbytes, _PIECE):
            digest.update(os.pread(self.file.fileno(), min(_PIECE, block.nbytes - at), block.offset + at))
        return digest.hexdigest()

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_locked(path: Path, stack: ExitStack) -> io.FileIO | None:
    """The weight file of the entry at `path` with a shared lock on it, or None if there is no such entry."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            file = stack.enter_context(io.FileIO(os.open(path / WEIGHTS, OPEN_FLAGS)))
            if try_lock(file.fileno(), shared=True) and is_still_at(file.fileno(), path / WEIGHTS):
                return file
        except FileNotFoundError:
            if path.is_dir():
                raise CacheError(f"{path}: not an entry of this cache: it has no {WEIGHTS}") from None
            return None
        except OSError as error:
            reason = "a link" if error.errno == errno.ELOOP else error.strerror or str(error)
            raise CacheError(f"{path / WEIGHTS}: cannot be opened: {reason}") from None
        stack.pop_all().close()
        time.sleep(_PAUSE_S)
    return None  # somebody holds it for good: about to be removed


def _checked_layout(file: Path, fd: int, manifest: Manifest) -> FileLayout:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CacheError(f"{file}: not a regular file")
    if status.st_size != manifest.file_size:
        raise CacheError(f"{file}: has {status.st_size} bytes, its manifest says {manifest.file_size}")
    length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    header = os.pread(fd, length, 0) if length <= MAX_HEADER else b""
    if hashlib.sha256(header).hexdigest() != manifest.header_sha256:
        raise CacheError(f"{file}: damaged header: its digest is not the manifest's")
    layout = FileLayout.parse(header)
    if layout.file_size != status.st_size:
        raise CacheError(f"{file}: has {status.st_size} bytes, its header needs {layout.file_size}")
    if [name for name, _ in manifest.blocks_sha256] != [block.name for block in layout.blocks]:
        raise CacheError(f"{file}: its blocks are not those of the manifest")
    return layout

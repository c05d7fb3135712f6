"""Writing an entry: who does it, and how it comes into being all at once.

One process is elected by the entry's lock, before it loads anything, so that the others need not load the model only to
find that it has been written. What it writes lies under a temporary name until it is whole and on the disk; then one
rename makes it an entry. The kernel releases the lock of a writer that dies; what it left is swept by the next one.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polymux.errors import CacheError
from polymux.memory.runtime_cache.entry import OPEN_FLAGS, Entry
from polymux.memory.runtime_cache.identity import Identity
from polymux.memory.runtime_cache.layout import FileLayout, PlacedBlock
from polymux.memory.runtime_cache.locks import LockFile, try_lock
from polymux.memory.runtime_cache.manifest import MANIFEST, WEIGHTS, Manifest, encode
from polymux.memory.runtime_cache.store import Store
from polymux.version import VERSION

logger = logging.getLogger(__name__)

ReadTensor = Callable[[str], memoryview]
"""The bytes of a tensor by name, contiguous. Called from several threads."""

_FAILED = "failed: "


class Stage(enum.Enum):
    """The stages of writing an entry, for tests that end a writer at each of them."""

    CREATED = enum.auto()
    HALF_WRITTEN = enum.auto()
    WRITTEN = enum.auto()
    SYNCED = enum.auto()
    SEALED = enum.auto()  # the manifest is on the disk too
    RENAMED = enum.auto()
    DONE = enum.auto()


def _nothing(stage: Stage) -> None:
    pass


@dataclass(frozen=True)
class Content:
    """What goes into an entry."""

    identity: Identity
    label: str
    layout: FileLayout
    read: ReadTensor


class Writer:
    """The right to write the entry of one identity, for as long as the lock is held."""

    def __init__(self, store: Store, lock: LockFile, *, limit: int | None, threads: int) -> None:
        """`limit`: bytes that all entries together may take."""
        self._store, self._lock, self._limit, self._threads = store, lock, limit, threads

    def publish(self, content: Content, at: Callable[[Stage], None] = _nothing) -> Entry:
        """Write the entry and open it. Raises CacheError; then nothing of it is left, and those who wait are told."""
        digest = content.identity.digest
        temporary = self._store.temporary(digest)
        start = time.perf_counter()
        try:
            with _file_errors(self._store.root):
                self._store.sweep(self._lock)
                if self._store.path(digest).exists():
                    self._store.remove(digest)  # damaged: a good one would have been opened
                self._make_room(content.layout.file_size)
                entry = self._write(content, temporary, at)
        except CacheError as error:
            self._lock.note(_FAILED + error.message)
            raise
        finally:
            self._store.discard(temporary)
        seconds, gib = time.perf_counter() - start, content.layout.file_size / 2**30
        logger.info("runtime cache: wrote %s (%s), %.2f GiB in %.1f s", digest, content.label, gib, seconds)
        return entry

    def release(self) -> None:
        """Let somebody else write."""
        self._lock.release()

    def _make_room(self, size: int) -> None:
        if self._limit is not None and not self._store.make_room(size, self._limit):
            raise CacheError(
                f"an entry of {size / 2**30:.2f} GiB does not fit into the limit of {self._limit / 2**30:.2f} GiB, "
                "with what running processes map"
            )
        disk = os.statvfs(self._store.root)
        free = disk.f_bavail * disk.f_frsize
        if free < size:
            raise CacheError(f"{self._store.root}: {free / 2**30:.2f} GiB free on the disk, needs {size / 2**30:.2f}")

    def _write(self, content: Content, temporary: Path, at: Callable[[Stage], None]) -> Entry:
        digest = content.identity.digest
        temporary.mkdir()
        at(Stage.CREATED)
        blocks = _write_weights(temporary / WEIGHTS, content, self._threads, at)
        manifest = Manifest(
            label=content.label,
            identity=content.identity,
            file_size=content.layout.file_size,
            header_sha256=hashlib.sha256(content.layout.header).hexdigest(),
            blocks_sha256=tuple((block.name, blocks[block.name]) for block in content.layout.placed),
            written_by=f"polymux {VERSION}",
            written_at=time.time(),
        )
        _write_synced(temporary / MANIFEST, encode(manifest))
        _sync(temporary)
        at(Stage.SEALED)
        # Locked before it has its name, so that nobody evicts it between the rename and the opening.
        held = os.open(temporary / WEIGHTS, OPEN_FLAGS)
        try:
            try_lock(held, shared=True)
            temporary.rename(self._store.path(digest))
            at(Stage.RENAMED)
            _sync(self._store.root)
            if self._limit is not None:
                self._store.make_room(0, self._limit)  # others may have written at the same time
            at(Stage.DONE)
            entry = self._store.open(digest)
        finally:
            os.close(held)
        if entry is None:
            raise CacheError(f"{self._store.path(digest)}: gone right after it was written")
        return entry


def elect(store: Store, digest: str, reopen: Callable[[bool], Entry | None], timeout_s: float) -> LockFile | Entry:
    """Get the lock of an entry's writer, or wait until another process has written the entry.

    `reopen` opens the entry if it is good; it is told whether there was a wait. Raises CacheError if time runs out, if
    the one that was waited for failed, or if the directory cannot be written.
    """
    lock = store.lock(digest)
    with ExitStack() as stack, _file_errors(store.root):
        store.root.mkdir(parents=True, exist_ok=True)
        waited = not lock.acquire()
        if waited:
            logger.info("runtime cache: waiting up to %g s for another process (%s)", timeout_s, lock.read_note())
            if not lock.acquire(timeout_s):
                raise CacheError(f"{lock.path}: still being written ({lock.read_note()}) after {timeout_s:g} s")
        stack.callback(lock.release)
        entry = reopen(waited)
        if entry is not None:
            return entry
        note = lock.read_note()
        if waited and note.startswith(_FAILED):  # it would fail here as well: do not make everybody try in turn
            raise CacheError(f"another process tried to write it and {note}")
        lock.note(f"process {os.getpid()}")
        stack.pop_all()
        return lock


@contextmanager
def _file_errors(root: Path) -> Iterator[None]:
    """What goes wrong with files, as a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(f"{error.filename or root}: {error.strerror or error}") from None


def _write_weights(file: Path, content: Content, threads: int, at: Callable[[Stage], None]) -> dict[str, str]:
    """Write the packed file to the disk. Returns the digest of every block."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        _write_at(fd, memoryview(content.layout.header), 0)
        digests: dict[str, str] = {}
        with ThreadPoolExecutor(threads, thread_name_prefix="polymux-publish") as pool:
            blocks = content.layout.placed
            running = {pool.submit(_write_block, fd, block, content.read): block.name for block in blocks}
            try:
                for done in as_completed(running):
                    digests[running[done]] = done.result()
                    if len(digests) == (len(blocks) + 1) // 2:
                        at(Stage.HALF_WRITTEN)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        at(Stage.WRITTEN)
        os.fsync(fd)
        at(Stage.SYNCED)
        return digests
    finally:
        os.close(fd)


def _write_block(fd: int, block: PlacedBlock, read: ReadTensor) -> str:
    """Write one block's range and return its digest."""
    digest, at = hashlib.sha256(), 0
    for tensor in block.tensors:
        data = read(tensor.spec.name)
        if data.nbytes != tensor.spec.nbytes:
            raise CacheError(f"tensor {tensor.spec.name!r} has {data.nbytes} bytes, its shape {tensor.spec.nbytes}")
        for piece in (bytes(tensor.offset - at), data):
            digest.update(piece)
            _write_at(fd, memoryview(piece), block.offset + at)
            at += memoryview(piece).nbytes
    rest = bytes(block.nbytes - at)
    digest.update(rest)
    _write_at(fd, memoryview(rest), block.offset + at)
    return digest.hexdigest()


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """All of `data`: the kernel may take less at a time, and takes 2 GiB at most."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""The directory of the cache: names in it, what it holds, removal, and making room.

    <root>/<digest>/weights.safetensors, manifest.json     an entry; never changed after it got this name
    <root>/<digest>.lock                                   who holds its lock may write the entry
    <root>/.new-<digest>-XXXX/                             being written by the holder of that lock
    <root>/.old-<digest>-XXXX/                             being removed

Whatever else is in the directory is not looked at and not touched. An entry that is mapped somewhere holds a shared
lock on its weight file; who removes an entry holds that lock exclusively, so neither happens while the other does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polymux.errors import CacheError
from polymux.memory.runtime_cache.entry import OPEN_FLAGS, Entry
from polymux.memory.runtime_cache.locks import LockFile, is_still_at, try_lock
from polymux.memory.runtime_cache.manifest import MANIFEST, WEIGHTS, Manifest, read_manifest

logger = logging.getLogger(__name__)

_ENTRY = re.compile(r"[0-9a-f]{32}")
_LOCK = re.compile(r"([0-9a-f]{32})\.lock")
_LEFTOVER = re.compile(r"\.(new|old)-([0-9a-f]{32})-[0-9a-f]{16}")


@dataclass(frozen=True)
class Listed:
    """An entry as a listing shows it. `manifest` is None if it cannot be read; `problem` says why."""

    digest: str
    nbytes: int
    last_used: float  # seconds since 1970
    in_use: bool
    manifest: Manifest | None
    problem: str | None


class Store:
    """All access to the cache's directory by name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        return self.root / digest

    def lock(self, digest: str) -> LockFile:
        """The lock whose holder may write the entry."""
        return LockFile(self.root / f"{digest}.lock")

    def temporary(self, digest: str) -> Path:
        """A new name for an entry that is being written. Only the holder of the entry's lock may ask."""
        return self.root / f".new-{digest}-{secrets.token_hex(8)}"

    def open(self, digest: str, *, touch: bool = True) -> Entry | None:
        """The entry, None if there is none. `touch`: this counts as a use. Raises CacheError if it cannot be used."""
        return Entry.open(self.path(digest), touch=touch)

    def digests(self) -> list[str]:
        """The names of all entries, good or damaged."""
        return sorted(name for name in self._names() if _ENTRY.fullmatch(name) and self.path(name).is_dir())

    def entries(self) -> list[Listed]:
        """All entries, the one used last first."""
        found = []
        for digest in self.digests():
            with contextlib.suppress(FileNotFoundError):  # removed by somebody else meanwhile
                found.append(self._listed(digest))
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def remove(self, digest: str) -> None:
        """Remove an entry. Raises CacheError if a process maps it, or if it holds files that are not the cache's."""
        path = self.path(digest)
        try:
            with _removable(path):
                doomed = self.root / f".old-{digest}-{secrets.token_hex(8)}"
                path.rename(doomed)  # from here on nobody finds it
            _delete(doomed)
        except OSError as error:
            raise CacheError(f"{path}: cannot be removed: {error.strerror or error}") from None

    def make_room(self, needed: int, limit: int) -> bool:
        """Remove the entries used longest ago until `needed` more bytes keep within `limit`. False, and nothing is
        removed, if what is mapped leaves too little."""
        entries = self.entries()
        total = sum(entry.nbytes for entry in entries)
        if needed + sum(entry.nbytes for entry in entries if entry.in_use) > limit:
            return False
        for entry in reversed(entries):
            if total + needed <= limit:
                break
            try:
                self.remove(entry.digest)
            except CacheError as error:
                logger.info("runtime cache: kept %s: %s", entry.digest, error.message)
                continue
            total -= entry.nbytes
            logger.info("runtime cache: evicted %s, %.1f GiB", entry.digest, entry.nbytes / 2**30)
        return total + needed <= limit

    def discard(self, temporary: Path) -> None:
        """Delete what was written under a temporary name, if it is there."""
        with contextlib.suppress(OSError):  # the next writer sweeps
            _delete(temporary)

    def sweep(self, held: LockFile | None = None) -> None:
        """Remove what writers and removers left behind when they died. `held`: the one lock that the caller holds."""
        names = self._names()
        leftovers = [match for name in names if (match := _LEFTOVER.fullmatch(name))]
        with contextlib.suppress(OSError):  # best effort: the next one tries again
            for match in leftovers:
                if match[1] == "old":
                    _delete(self.root / match[0])
            waiting = {match[2] for match in leftovers if match[1] == "new"}
            for digest in waiting | {match[1] for name in names if (match := _LOCK.fullmatch(name))}:
                self._sweep_unwritten(digest, held)

    def _sweep_unwritten(self, digest: str, held: LockFile | None) -> None:
        """Remove half-written entries of a digest that nobody is writing."""
        lock = self.lock(digest)
        mine = held is not None and held.path == lock.path
        if not mine and not lock.acquire():
            return
        try:
            for path in self.root.glob(f".new-{digest}-*"):
                _delete(path)
        finally:
            if not mine:
                lock.release(remove=True)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"{self.root}: cannot be read: {error.strerror or error}") from None

    def _listed(self, digest: str) -> Listed:
        path = self.path(digest)
        nbytes = sum(file.lstat().st_size for file in path.iterdir())
        try:
            manifest, problem = read_manifest(path / MANIFEST), None
            last_used = (path / MANIFEST).stat().st_mtime
        except CacheError as error:
            manifest, problem = None, error.message
            last_used = path.stat().st_mtime
        return Listed(digest, nbytes, last_used, _in_use(path), manifest, problem)


def _in_use(path: Path) -> bool:
    try:
        fd = os.open(path / WEIGHTS, OPEN_FLAGS)
    except OSError:
        return False
    try:
        return not try_lock(fd, shared=False)
    except OSError:
        return True  # a file system without locks: rather keep too much
    finally:
        os.close(fd)


@contextmanager
def _removable(path: Path) -> Iterator[None]:
    """Make sure that the directory is an entry of ours that nobody uses, and that nobody starts to."""
    for file in path.iterdir():
        if file.name not in (WEIGHTS, MANIFEST) or not stat.S_ISREG(file.lstat().st_mode):
            raise CacheError(f"{path}: not touched: {file.name} is not a file of this cache")
    try:
        fd = os.open(path / WEIGHTS, OPEN_FLAGS)
    except FileNotFoundError:
        yield  # half an entry: there is nothing that could be mapped
        return
    try:
        if not try_lock(fd, shared=False) or not is_still_at(fd, path / WEIGHTS):
            raise CacheError(f"{path}: in use: a running process maps it")
        yield
    finally:
        os.close(fd)


def _delete(path: Path) -> None:
    """Delete a directory that holds nothing but an entry's files."""
    for name in (WEIGHTS, MANIFEST):
        (path / name).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()

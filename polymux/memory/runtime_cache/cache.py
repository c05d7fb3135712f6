"""The runtime cache as loading uses it: an open entry, the right to write one, or neither.

Whatever is wrong with the cache costs speed and nothing else: it ends in one line of the log, and the weights are
loaded into private memory. Knows neither torch nor models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polymux.errors import CacheError
from polymux.memory.runtime_cache.entry import Entry
from polymux.memory.runtime_cache.identity import Identity
from polymux.memory.runtime_cache.publish import Content, Stage, Writer, elect
from polymux.memory.runtime_cache.store import Store

logger = logging.getLogger(__name__)

_PRIVATE = "the weights are loaded into private memory"


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """`limit`: bytes that all entries together may take. `verify_full`: read and check all bytes before use."""

    root: Path
    lock_timeout_s: float = 600.0
    limit: int | None = None
    verify_full: bool = False
    threads: int = 8


class RuntimeCache:
    """One directory of entries, used as the settings say."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.store = Store(settings.root)

    def open_or_none(self, identity: Identity) -> Entry | None:
        """The entry of these weights if there is one that can be used; logs what is wrong with one that cannot."""
        try:
            return self.open(identity)
        except CacheError as error:
            logger.warning("runtime cache: not used: %s", error.message)
            return None

    def open(self, identity: Identity) -> Entry | None:
        """The entry of these weights, checked as the settings say. Raises CacheError if it cannot be used."""
        entry = self.store.open(identity.digest)
        if entry is None:
            return None
        problem = None
        if entry.manifest.identity != identity:
            problem = "holds the weights of another identity"
        elif self.settings.verify_full and (damaged := entry.damaged_blocks(self.settings.threads)):
            problem = f"damaged: the bytes of {len(damaged)} blocks are wrong, the first is {damaged[0]!r}"
        if problem is not None:
            entry.close()
            raise CacheError(f"{entry.path}: {problem}")
        return entry

    @contextmanager
    def turn(self, identity: Identity) -> Iterator[Turn]:
        """Wait for whoever writes this entry, if somebody does. The turn has the entry, or may write it, or neither."""
        turn = Turn(self, identity)
        try:
            yield turn
        finally:
            turn.end()


class Turn:
    """One process's turn with one entry. `entry` is open from the start, or after `publish`, or None."""

    def __init__(self, cache: RuntimeCache, identity: Identity) -> None:
        self.identity = identity
        self.entry: Entry | None = None
        self._writer: Writer | None = None
        self._damaged = False
        try:
            self.entry = cache.open(identity)
        except CacheError as error:
            logger.warning("runtime cache: not used: %s", error.message)
            self._damaged = True
        if self.entry is None:
            self._elect(cache)

    def _elect(self, cache: RuntimeCache) -> None:
        settings = cache.settings

        def reopen(waited: bool) -> Entry | None:
            return None if self._damaged and not waited else cache.open_or_none(self.identity)

        try:
            elected = elect(cache.store, self.identity.digest, reopen, settings.lock_timeout_s)
        except CacheError as error:
            logger.warning("runtime cache: %s: %s", _PRIVATE, error.message)
            return
        if isinstance(elected, Entry):
            self.entry = elected
        else:
            self._writer = Writer(cache.store, elected, limit=settings.limit, threads=settings.threads)

    @property
    def may_write(self) -> bool:
        return self._writer is not None

    def publish(self, content: Content, at: Callable[[Stage], None] | None = None) -> None:
        """Write the entry and open it, if it can be written. `at` is told each stage."""
        assert self._writer is not None
        try:
            self.entry = self._writer.publish(content) if at is None else self._writer.publish(content, at)
        except CacheError as error:
            logger.warning("runtime cache: not written, %s: %s", _PRIVATE, error.message)

    def end(self) -> None:
        """Let others write, and close the entry; what was mapped stays mapped."""
        if self._writer is not None:
            self._writer.release()
        if self.entry is not None:
            self.entry.close()

"""`polymux cache`: what the runtime cache holds, whether it is whole, and removing it.

Knows how entries are shown; which may be removed, and what is damaged, is the cache's business.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from polymux.config import runtime_cache_dir
from polymux.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from polymux.memory.runtime_cache.store import Listed, Store

HELP = "list, verify or remove the weights that engines of this host share"
USAGE = "polymux cache ls | verify [ENTRY ...] | rm ENTRY ... | rm --all  [--dlo-runtime-cache-dir DIR]"

_HEADINGS = ("ENTRY", "SIZE", "LAST USED", "IN USE", "WEIGHTS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "verify", "rm"), help="what to do")
    parser.add_argument("entries", nargs="*", default=(), metavar="ENTRY", help="the beginning of a name that ls shows")
    parser.add_argument("--all", action="store_true", help="rm: all entries, and what killed writers left")
    parser.add_argument("--dlo-runtime-cache-dir", metavar="DIR", help="where the runtime cache is, as for serve")


def run(arguments: argparse.Namespace) -> int:
    from polymux.memory.runtime_cache.store import Store  # here, because not every system has its file locks

    store = Store(runtime_cache_dir(arguments.dlo_runtime_cache_dir))
    if arguments.action == "ls":
        if arguments.entries or arguments.all:
            raise ConfigError("ls takes no entries: it lists them all")
        return _list(store)
    if arguments.action == "verify":
        if arguments.all:
            raise ConfigError("verify checks all entries unless some are named; --all goes with rm", param="all")
        return _verify(store, _named(store, arguments.entries) or store.digests())
    if arguments.all == bool(arguments.entries):
        raise ConfigError("rm takes the names of entries, or --all")
    digests = store.digests() if arguments.all else _named(store, arguments.entries)
    return _remove(store, digests, sweep=arguments.all)


def _named(store: Store, prefixes: list[str]) -> list[str]:
    """The entries whose names begin like this. Raises ConfigError unless each is exactly one."""
    known, found = store.digests(), []
    for prefix in prefixes:
        matches = [digest for digest in known if digest.startswith(prefix)]
        if len(matches) != 1:
            which = "no entry begins" if not matches else f"{len(matches)} entries begin"
            raise ConfigError(f"{which} with {prefix!r} in {store.root}; polymux cache ls lists them")
        found.append(matches[0])
    return list(dict.fromkeys(found))


def _list(store: Store) -> int:
    entries = store.entries()
    rows = [_HEADINGS, *map(_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{len(entries)} entries, {_size(sum(entry.nbytes for entry in entries))} in {store.root}")
    return 0


def _row(entry: Listed) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
    weights = f"unusable: {entry.problem}"
    if entry.manifest is not None:
        identity = entry.manifest.identity
        weights = f"{entry.manifest.label}, {identity.dtype}"
        size, rank = identity.tensor_parallel
        weights += f", rank {rank} of {size}" if size > 1 else ""
        weights += f", {identity.quantization}" if identity.quantization else ""
        weights += f", {len(identity.adapters)} adapters" if identity.adapters else ""
    return entry.digest[:12], _size(entry.nbytes), used, "yes" if entry.in_use else "no", weights


def _verify(store: Store, digests: list[str]) -> int:
    failed = 0
    for digest in digests:
        try:
            problem = _problem(store, digest)
        except CacheError as error:
            problem = error.message
        failed += problem is not None
        print(f"{digest[:12]}  {'ok' if problem is None else problem}", flush=True)
    print(f"\n{len(digests) - failed} of {len(digests)} entries are whole")
    return 1 if failed else 0


def _problem(store: Store, digest: str) -> str | None:
    """What is wrong with an entry after reading all of it. Raises CacheError if it cannot even be opened."""
    entry = store.open(digest, touch=False)
    if entry is None:
        return "gone"
    with entry:
        damaged = entry.damaged_blocks(threads=os.cpu_count() or 1)
    return f"damaged: the bytes of {', '.join(repr(name) for name in damaged)} are wrong" if damaged else None


def _remove(store: Store, digests: list[str], *, sweep: bool) -> int:
    failed = 0
    for digest in digests:
        try:
            store.remove(digest)
            print(f"{digest[:12]}  removed")
        except CacheError as error:
            print(f"{digest[:12]}  {error.message}")
            failed += 1
    if sweep:
        store.sweep()
    return 1 if failed else 0


def _size(nbytes: int) -> str:
    """In the largest unit that leaves a digit before the point."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if unit != "B" else f"{nbytes} B"

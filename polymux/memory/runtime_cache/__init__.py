"""The runtime cache: final weights of a component in one packed file, which every process of the host maps.

    identity   what determines the bytes, and the name that follows from it
    layout     the packed file            manifest   what must be true of it
    store      the directory              entry      one entry, open and checked
    publish    who writes, and how        locks      what the kernel releases when a process dies
    cache      all of it together, as loading uses it

These import no torch. `mapped` and `staging`, which turn an open entry into tensors and device copies, do.
"""

from polymux.memory.runtime_cache.cache import CacheSettings, RuntimeCache, Turn
from polymux.memory.runtime_cache.entry import Entry
from polymux.memory.runtime_cache.identity import Adapter, Identity, SourceFile, source_files
from polymux.memory.runtime_cache.publish import Content

__all__ = [
    "Adapter",
    "CacheSettings",
    "Content",
    "Entry",
    "Identity",
    "RuntimeCache",
    "SourceFile",
    "Turn",
    "source_files",
]

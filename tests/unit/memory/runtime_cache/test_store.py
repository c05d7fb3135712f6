"""What is mapped stays, what is foreign is not touched, and the oldest entries go first."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from cache_process import Start
from cache_worker import Job, cache_of, content_of, identity_of

from polymux.errors import CacheError
from polymux.memory.runtime_cache.manifest import MANIFEST


def write(job: Job, version: str, last_used: float) -> str:
    """Put an entry into the cache that was used at that time. Returns its digest."""
    job = msgspec.structs.replace(job, version=version)
    with cache_of(job).turn(identity_of(job)) as turn:
        turn.publish(content_of(job))
        assert turn.entry is not None
        os.utime(turn.entry.path / MANIFEST, (last_used, last_used))
    return identity_of(job).digest


def size(job: Job, digest: str) -> int:
    return {entry.digest: entry.nbytes for entry in cache_of(job).store.entries()}[digest]


def test_a_listing_shows_every_entry_last_used_first(job: Job) -> None:
    old, new = write(job, "1", 1000), write(job, "2", 2000)
    (Path(job.root) / old / MANIFEST).write_text("{}")
    os.utime(Path(job.root) / old, (1000, 1000))
    entries = cache_of(job).store.entries()
    assert [entry.digest for entry in entries] == [new, old]
    assert [entry.in_use for entry in entries] == [False, False]
    assert entries[0].manifest is not None and entries[0].manifest.label == "tests/2"
    assert entries[1].manifest is None and "damaged" in str(entries[1].problem)


def test_opening_an_entry_makes_it_the_last_used(job: Job) -> None:
    first, second = write(job, "1", 1000), write(job, "2", 2000)
    entry = cache_of(job).store.open(first)
    assert entry is not None
    entry.close()
    assert [e.digest for e in cache_of(job).store.entries()] == [first, second]


def test_the_entry_used_longest_ago_makes_room(job: Job) -> None:
    new, old, newest = write(job, "1", 2000), write(job, "2", 1000), write(job, "3", 3000)
    nbytes = size(job, new)
    slack = nbytes // 2  # manifests differ by some bytes: they say when they were written, and by whom
    assert cache_of(job).store.make_room(nbytes, 3 * nbytes + slack)
    assert cache_of(job).store.digests() == sorted([new, newest])
    assert old not in os.listdir(job.root)


def test_room_for_what_can_never_fit_costs_nothing(job: Job) -> None:
    write(job, "1", 1000)
    nbytes = size(job, write(job, "2", 1000))
    assert not cache_of(job).store.make_room(3 * nbytes, 2 * nbytes)
    assert len(cache_of(job).store.digests()) == 2


def test_publishing_keeps_to_the_limit(start: Start, job: Job) -> None:
    old, new = write(job, "1", 1000), write(job, "2", 2000)
    limited = msgspec.structs.replace(job, version="3", limit=2 * size(job, old) + 4096)
    assert start(limited).go().result()["wrote"]
    assert cache_of(job).store.digests() == sorted([new, identity_of(limited).digest])


def test_an_entry_that_a_process_maps_is_never_evicted_nor_removed(start: Start, job: Job) -> None:
    mapped = start(msgspec.structs.replace(job, hold=True)).go()
    assert mapped.result()["wrote"]
    held, free = identity_of(job).digest, write(job, "2", 9e9)  # the mapped one is the least recently used
    limit = 2 * size(job, held) + 4096
    another = start(msgspec.structs.replace(job, version="3", limit=limit)).go()
    assert another.result()["wrote"]
    assert free not in cache_of(job).store.digests()
    (entry,) = [entry for entry in cache_of(job).store.entries() if entry.digest == held]
    assert entry.in_use
    with pytest.raises(CacheError, match="in use"):
        cache_of(job).store.remove(held)
    assert not cache_of(job).store.make_room(limit, limit), "no room beside what is mapped"
    assert mapped.end() == 0
    cache_of(job).store.remove(held)
    assert held not in os.listdir(job.root)


def test_a_mapping_whose_process_was_killed_holds_nothing(start: Start, job: Job) -> None:
    mapped = start(msgspec.structs.replace(job, hold=True)).go()
    assert mapped.result()["wrote"]
    mapped.process.kill()
    mapped.process.wait()
    cache_of(job).store.remove(identity_of(job).digest)
    assert cache_of(job).store.digests() == []


FOREIGN = ["notes.txt", "0123.lock", ".new-thing/file", "models/weights.safetensors", "a" * 32]


def test_foreign_files_are_not_touched(job: Job) -> None:
    for name in FOREIGN:
        path = Path(job.root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    digest = write(job, "1", 1000)
    store = cache_of(job).store
    assert store.digests() == [digest]
    store.sweep()
    assert store.make_room(0, 0)
    assert [(Path(job.root) / name).read_text() for name in FOREIGN] == ["mine"] * len(FOREIGN)
    assert store.digests() == []


def test_an_entry_that_holds_a_foreign_file_is_not_removed(job: Job) -> None:
    digest = write(job, "1", 1000)
    (Path(job.root) / digest / "notes.txt").write_text("mine")
    with pytest.raises(CacheError, match=r"not touched: notes\.txt"):
        cache_of(job).store.remove(digest)
    assert not cache_of(job).store.make_room(0, 0)
    assert len(os.listdir(Path(job.root) / digest)) == 3


def test_a_sweep_leaves_a_running_writer_alone(job: Job) -> None:
    store, digest = cache_of(job).store, identity_of(job).digest
    Path(job.root).mkdir()
    lock = store.lock(digest)
    assert lock.acquire()
    temporary = store.temporary(digest)
    temporary.mkdir()
    store.sweep()
    assert temporary.exists()
    assert lock.path.exists()
    lock.release()
    store.sweep()
    assert os.listdir(job.root) == []

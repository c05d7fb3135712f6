"""An entry that is not what it should be is never opened, and full verification finds any flipped byte."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_worker import Job, cache_of, content_of, identity_of, layout_of

from polymux.errors import CacheError
from polymux.memory.runtime_cache.cache import RuntimeCache
from polymux.memory.runtime_cache.manifest import MANIFEST, WEIGHTS


@pytest.fixture
def cache(job: Job) -> RuntimeCache:
    """A cache with one good entry."""
    cache = cache_of(job)
    with cache.turn(identity_of(job)) as turn:
        turn.publish(content_of(job))
    return cache


@pytest.fixture
def entry(cache: RuntimeCache, job: Job) -> Path:
    return cache.store.path(identity_of(job).digest)


def flip(file: Path, at: int) -> None:
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_a_good_entry_is_opened_and_whole(cache: RuntimeCache, job: Job) -> None:
    entry = cache.open_or_none(identity_of(job))
    assert entry is not None
    with entry:
        assert entry.layout == layout_of(job)
        assert entry.damaged_blocks(threads=2) == []


@pytest.mark.parametrize("where", ["weight", "padding", "last byte"])
def test_full_verification_finds_a_flipped_byte_and_names_the_block(
    cache: RuntimeCache, entry: Path, job: Job, where: str
) -> None:
    block = layout_of(job).placed[2]
    at = {
        "weight": block.offset + 5,
        "padding": block.offset + block.tensors[-1].end,
        "last byte": block.offset + block.nbytes - 1,
    }[where]
    flip(entry / WEIGHTS, at)
    opened = cache.open_or_none(identity_of(job))
    assert opened is not None, "sizes and header are good"
    with opened:
        assert opened.damaged_blocks(threads=2) == [block.name]


def test_a_cache_set_to_full_verification_refuses_it(cache: RuntimeCache, entry: Path, job: Job) -> None:
    flip(entry / WEIGHTS, layout_of(job).placed[2].offset)
    job.verify_full = True
    with pytest.raises(CacheError, match=r"damaged: the bytes of 1 blocks are wrong, the first is 'blocks.1'"):
        cache_of(job).open(identity_of(job))


@pytest.mark.parametrize("at", [0, 9, 300, 60000])
def test_a_flipped_byte_of_the_header_is_always_found(cache: RuntimeCache, entry: Path, job: Job, at: int) -> None:
    flip(entry / WEIGHTS, at)
    with pytest.raises(CacheError, match="damaged header"):
        cache.open(identity_of(job))


def test_any_flipped_byte_of_the_manifest_is_always_found(cache: RuntimeCache, entry: Path, job: Job) -> None:
    whole = (entry / MANIFEST).read_bytes()
    for at in range(0, len(whole), 7):
        flip(entry / MANIFEST, at)
        with pytest.raises(CacheError):
            cache.open(identity_of(job))
        (entry / MANIFEST).write_bytes(whole)
    opened = cache.open(identity_of(job))
    assert opened is not None
    opened.close()


def truncate(entry: Path) -> None:
    os.truncate(entry / WEIGHTS, (entry / WEIGHTS).stat().st_size - 4096)


def lengthen(entry: Path) -> None:
    os.truncate(entry / WEIGHTS, (entry / WEIGHTS).stat().st_size + 4096)


def link(entry: Path) -> None:
    shutil.copy(entry / WEIGHTS, entry.parent / "elsewhere")
    (entry / WEIGHTS).unlink()
    (entry / WEIGHTS).symlink_to(entry.parent / "elsewhere")


def no_manifest(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def no_weights(entry: Path) -> None:
    (entry / WEIGHTS).unlink()


def pipe(entry: Path) -> None:
    (entry / WEIGHTS).unlink()
    os.mkfifo(entry / WEIGHTS)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, "its manifest says"),
        (lengthen, "its manifest says"),
        (link, "a link"),
        (no_manifest, "manifest.json: cannot be read"),
        (no_weights, "not an entry of this cache"),
        (pipe, "not a regular file"),
    ],
)
def test_what_is_not_an_entry_is_refused(
    cache: RuntimeCache,
    entry: Path,
    job: Job,
    harm: Callable[[Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harm(entry)
    assert cache.open_or_none(identity_of(job)) is None
    (line,) = caplog.messages
    assert reason in line


def test_an_entry_under_another_name_is_refused(cache: RuntimeCache, entry: Path, job: Job) -> None:
    job.version = "2"
    entry.rename(cache.store.path(identity_of(job).digest))
    with pytest.raises(CacheError, match="another identity"):
        cache.open(identity_of(job))


def test_nothing_there_is_no_error(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    assert cache_of(job).open_or_none(identity_of(job)) is None
    assert caplog.messages == []

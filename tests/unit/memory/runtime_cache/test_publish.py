"""Entries are written once, whole or not at all, whoever dies when."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from cache_process import Start, Worker
from cache_worker import Job, cache_of, content_of, identity_of, layout_of

from polymux.errors import CacheError
from polymux.memory.runtime_cache.manifest import MANIFEST, WEIGHTS
from polymux.memory.runtime_cache.publish import Stage, elect

WaitUntil = Callable[[Callable[[], bool]], None]


def names(job: Job) -> set[str]:
    return set(os.listdir(job.root))


def is_elected(worker: Worker, job: Job) -> bool:
    """Whether this worker holds the lock."""
    return cache_of(job).store.lock(identity_of(job).digest).read_note() == f"process {worker.process.pid}"


@pytest.mark.parametrize("count", [2, 4])
def test_concurrent_starters_publish_once(start: Start, job: Job, count: int) -> None:
    workers = [start(job) for _ in range(count)]
    for worker in workers:
        worker.go()
    results = [worker.result() for worker in workers]
    assert sum(result["wrote"] for result in results) == 1
    assert sum(result["loaded"] for result in results) == 1, "who waits does not load"
    assert all(result["right"] for result in results)
    digest = identity_of(job).digest
    assert names(job) == {digest, f"{digest}.lock"}


@pytest.mark.parametrize("stage", list(Stage))
def test_a_writer_killed_at_any_stage_leaves_a_usable_cache(
    start: Start, job: Job, stage: Stage, wait_until: WaitUntil
) -> None:
    waiting = start(job)
    doomed = start(msgspec.structs.replace(job, die_at=stage.name, load_s=0.3)).go()
    wait_until(lambda: is_elected(doomed, job))
    waiting.go()
    assert doomed.end() == -signal.SIGKILL
    published = stage in (Stage.RENAMED, Stage.DONE)
    assert waiting.result() == {"loaded": not published, "wrote": not published, "right": True}
    digest = identity_of(job).digest
    assert names(job) == {digest, f"{digest}.lock"}, "nothing is left of the dead"


def test_what_a_writer_left_goes_when_another_entry_is_written(start: Start, job: Job) -> None:
    doomed = start(msgspec.structs.replace(job, die_at=Stage.HALF_WRITTEN.name)).go()
    assert doomed.end() == -signal.SIGKILL
    assert any(name.startswith(".new-") for name in names(job))
    other = msgspec.structs.replace(job, version="2")
    assert start(other).go().result()["wrote"]
    digest = identity_of(other).digest
    assert names(job) == {digest, f"{digest}.lock"}


def test_a_waiter_that_times_out_goes_on_without(start: Start, job: Job, wait_until: WaitUntil) -> None:
    slow = start(msgspec.structs.replace(job, load_s=30)).go()
    wait_until(lambda: is_elected(slow, job))
    waiting = start(msgspec.structs.replace(job, lock_timeout_s=0.2)).go()
    assert waiting.result() == {"loaded": True, "wrote": False, "right": None}
    assert f"process {slow.process.pid}) after 0.2 s" in waiting.log()


def disk_full(job: Job) -> Job:
    return msgspec.structs.replace(job, max_file_bytes=layout_of(job).file_size // 2)


def test_a_write_that_fails_half_way_leaves_nothing(start: Start, job: Job) -> None:
    worker = start(disk_full(job)).go()
    assert worker.result() == {"loaded": True, "wrote": False, "right": None}
    assert "not written, the weights are loaded into private memory" in worker.log()
    assert names(job) == {f"{identity_of(job).digest}.lock"}
    assert start(job).go().result()["wrote"], "the next one may try again"


def test_those_who_wait_for_a_write_that_fails_do_not_try_in_turn(
    start: Start, job: Job, wait_until: WaitUntil
) -> None:
    failing = start(msgspec.structs.replace(disk_full(job), load_s=1)).go()
    wait_until(lambda: is_elected(failing, job))
    waiting = start(job).go()
    assert not failing.result()["wrote"]
    assert waiting.result() == {"loaded": True, "wrote": False, "right": None}
    assert "another process tried to write it and failed" in waiting.log()


@pytest.fixture
def tiny_disk() -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes, where the user may."""
    mounted: list[Path] = []

    def mount(nbytes: int) -> Path:
        path = Path(tempfile.mkdtemp())
        if os.system(f"mount -t tmpfs -o size={nbytes} polymux-test {path} 2>/dev/null"):
            path.rmdir()
            pytest.skip("mounting a file system is not allowed here")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        os.system(f"umount {path}")
        path.rmdir()


def test_a_full_disk_is_seen_before_anything_is_written(
    tiny_disk: Callable[[int], Path], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.root = str(tiny_disk(layout_of(job).file_size // 2))
    with cache_of(job).turn(identity_of(job)) as turn:
        turn.publish(content_of(job))
        assert turn.entry is None
    assert "GiB free on the disk" in caplog.messages[-1]


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    tiny_disk: Callable[[int], Path], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.root = str(tiny_disk(layout_of(job).file_size + 2**16))

    def fill_up(stage: Stage) -> None:
        if stage is Stage.CREATED:
            (Path(job.root) / "foreign").write_bytes(bytes(layout_of(job).file_size // 2))

    with cache_of(job).turn(identity_of(job)) as turn:
        turn.publish(content_of(job), fill_up)
        assert turn.entry is None
    assert "No space left on device" in caplog.messages[-1]
    assert names(job) == {"foreign", f"{identity_of(job).digest}.lock"}


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A folder that other users may look into, unlike pytest's own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_directory_that_may_only_be_read_serves_what_it_has(start: Start, job: Job, public_dir: Path) -> None:
    job.root = str(public_dir)
    assert start(job).go().result()["wrote"]
    public_dir.chmod(0o555)
    reader = start(msgspec.structs.replace(job, unprivileged=True)).go()
    assert reader.result() == {"loaded": False, "wrote": False, "right": True}
    other = start(msgspec.structs.replace(job, unprivileged=True, version="2")).go()
    assert other.result() == {"loaded": True, "wrote": False, "right": None}
    assert "Permission denied" in other.log()
    public_dir.chmod(0o755)


@pytest.mark.parametrize("file", [WEIGHTS, MANIFEST])
def test_a_damaged_entry_is_replaced(start: Start, job: Job, file: str) -> None:
    assert start(job).go().result()["wrote"]
    damaged = Path(job.root) / identity_of(job).digest / file
    os.truncate(damaged, 100)
    worker = start(job).go()
    assert worker.result() == {"loaded": True, "wrote": True, "right": True}
    assert "not used" in worker.log()


def test_a_foreign_directory_with_an_entrys_name_stays(start: Start, job: Job) -> None:
    foreign = Path(job.root) / identity_of(job).digest
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("the only copy")
    worker = start(job).go()
    assert worker.result() == {"loaded": True, "wrote": False, "right": None}
    assert "thesis.txt is not a file of this cache" in worker.log()
    assert (foreign / "thesis.txt").read_text() == "the only copy"


def test_a_tensor_of_the_wrong_size_is_not_written(job: Job) -> None:
    content = content_of(job)
    wrong = type(content)(content.identity, content.label, content.layout, lambda name: memoryview(b"1234"))
    with cache_of(job).turn(identity_of(job)) as turn:
        turn.publish(wrong)
        assert turn.entry is None
    assert names(job) == {f"{identity_of(job).digest}.lock"}


def test_the_lock_is_given_back_when_reopening_fails(job: Job) -> None:
    store, digest = cache_of(job).store, identity_of(job).digest

    def fail(waited: bool) -> None:
        raise CacheError("no")

    with pytest.raises(CacheError, match="no"):
        elect(store, digest, fail, 0.0)
    lock = elect(store, digest, lambda waited: None, 0.0)
    assert lock is not None

"""The folder of video jobs: what is in it after everything that may happen to a server."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polymux.errors import ConfigError, StorageError, StorageFullError
from polymux.server.video_store import LOST, STOPPED, JobError, VideoRecord, VideoStore
from polymux.server_config import VideoConfig

TTL = 100.0
MANY = 2**40


def record(number: int = 1, **fields: Any) -> VideoRecord:
    given = {"id": f"video_{number:032x}", "model": "m", "created_at": time.time(), "prompt": "a"}
    return VideoRecord(**given | {"extension": "mp4", "fps": 16.0, "seed": 1} | fields)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VideoStore]:
    opened = VideoStore.open(tmp_path, TTL)
    yield opened
    opened.close()


def add(store: VideoStore, number: int = 1, **fields: Any) -> VideoRecord:
    made = record(number, **fields)
    store.insert(made, 1000, MANY)
    return made


def complete(store: VideoStore, made: VideoRecord, content: bytes = b"video") -> None:
    store.partial(made.filename).write_bytes(content)
    store.complete(made, store.partial(made.filename))


def files(store: VideoStore) -> set[str]:
    return {path.name for folder in ("files", "partial") for path in (store.folder / folder).iterdir()}


def test_a_job_as_it_was_kept(store: VideoStore) -> None:
    made = add(store, seed=2**64 - 1, width=64, height=32, prompt="ünïcode\x00")
    assert store.get(made.id) == made
    store.advance(made.id, 40)
    store.advance(made.id, 30)
    now = store.get(made.id)
    assert now is not None and (now.status, now.progress) == ("in_progress", 40)
    complete(store, replace(made, num_frames=5))
    done = store.get(made.id)
    assert done is not None and (done.status, done.progress, done.num_frames, done.bytes) == ("completed", 100, 5, 5)
    store.advance(made.id, 50)
    assert store.get(made.id) == done, "what has ended does not run on"
    assert store.file(done).read_bytes() == b"video" and files(store) == {done.filename}
    assert store.stored_bytes() == 5


def test_a_folder_of_an_earlier_version(tmp_path: Path) -> None:
    store = VideoStore.open(tmp_path, TTL)
    made = add(store)
    complete(store, made)
    store._database.execute("ALTER TABLE videos DROP COLUMN profile")
    store._database.execute("PRAGMA user_version = 1")
    store.close()
    for number in (2, 3):
        store = VideoStore.open(tmp_path, TTL)
        kept = store.get(made.id)
        assert kept is not None and (kept.status, kept.profile) == ("completed", None)
        later = add(store, number)
        complete(store, replace(later, profile="{}"))
        assert [found.profile for found in store.page(1, None, "desc")] == ["{}"]
        store.close()


def test_deletion(store: VideoStore) -> None:
    made = add(store)
    complete(store, made)
    assert store.delete(made.id)
    assert not store.delete(made.id)
    assert store.get(made.id) is None and files(store) == set()


def test_completion_of_a_deleted_job_leaves_no_file(store: VideoStore) -> None:
    made = add(store)
    store.delete(made.id)
    with pytest.raises(StorageError, match="gone"):
        complete(store, made)
    assert files(store) == set()


def test_expiry_removes_row_and_file_together(store: VideoStore) -> None:
    old, new = add(store, 1), add(store, 2)
    complete(store, replace(old, expires_at=time.time() - 1))
    complete(store, replace(new, expires_at=time.time() + 50))
    assert store.get(old.id) is None, "although nobody has swept yet"
    assert [kept.id for kept in store.page(10, None, "desc")] == [new.id]
    next_at = store.expire()
    assert next_at is not None and next_at > time.time() and files(store) == {new.filename}
    store.delete(new.id)
    assert store.expire() is None


def test_pages(store: VideoStore) -> None:
    ids = [add(store, number).id for number in range(5)]
    assert [job.id for job in store.page(2, None, "asc")] == ids[:2]
    assert [job.id for job in store.page(2, ids[1], "asc")] == ids[2:4]
    assert [job.id for job in store.page(9, ids[3], "asc")] == ids[4:]
    assert [job.id for job in store.page(2, None, "desc")] == ids[:2:-1]
    store.delete(ids[2])
    assert [job.id for job in store.page(9, ids[2], "desc")] == ids[1::-1], "a deleted job still marks its place"


def test_limits(store: VideoStore) -> None:
    complete(store, add(store))
    with pytest.raises(StorageFullError, match="1 jobs are kept: allowed are 1"):
        store.insert(record(2), 1, MANY)
    with pytest.raises(StorageFullError, match="5 bytes of videos are kept: allowed are 5"):
        store.insert(record(2), 10, 5)
    assert len(store.page(9, None, "asc")) == 1


def test_a_video_can_be_deleted_when_the_disk_is_full(store: VideoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = add(store)
    complete(store, made)
    forget = store._forget

    def full_until_there_is_room(video_id: str) -> bool:
        if files(store):
            raise StorageFullError("the disk is full")
        return forget(video_id)

    monkeypatch.setattr(store, "_forget", full_until_there_is_room)
    assert store.delete(made.id)
    assert store.get(made.id) is None and files(store) == set()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    for folder in ("files", "partial"):
        (tmp_path / folder / "album").mkdir(parents=True)
        (tmp_path / folder / "holiday.mp4").write_bytes(b"somebody's")
    VideoStore.open(tmp_path, TTL).close()
    store = VideoStore.open(tmp_path, TTL)
    assert files(store) == {"album", "holiday.mp4"}
    store.close()


def test_what_a_killed_server_leaves(store: VideoStore, tmp_path: Path) -> None:
    states = {name: add(store, number) for number, name in enumerate(("waits", "runs", "done", "lost", "failed"))}
    store.advance(states["runs"].id, 50)
    complete(store, states["done"])
    complete(store, states["lost"])
    store.fail(states["failed"].id, JobError("out_of_memory", "too large", "size"), TTL)
    store.partial(record(8).filename).write_bytes(b"hal")
    store.partial("0" * 32).write_bytes(b"of no job")
    (tmp_path / "files" / record(9).filename).write_bytes(b"orphan")
    store.file(states["lost"]).unlink()
    store.close()  # which writes nothing: the rows are as they were when the process died

    again = VideoStore.open(tmp_path, TTL)
    try:
        found = {name: again.get(made.id) for name, made in states.items()}
        errors = {name: (job.status, job.error_code, job.progress) for name, job in found.items() if job is not None}
        assert errors == {
            "waits": ("failed", STOPPED.code, 0),
            "runs": ("failed", STOPPED.code, 50),
            "done": ("completed", None, 100),
            "lost": ("failed", LOST.code, 100),
            "failed": ("failed", "out_of_memory", 0),
        }
        assert files(again) == {states["done"].filename}
        job = found["waits"]
        assert job is not None and job.expires_at == pytest.approx(time.time() + TTL, abs=60)
        assert again.stored_bytes() == 5
    finally:
        again.close()
        store._database = sqlite3.connect(":memory:")  # for the fixture to close
        store._lock = os.open(os.devnull, os.O_RDONLY)


def test_a_folder_belongs_to_one_server(store: VideoStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to another server"):
        VideoStore.open(tmp_path, TTL)
    other = multiprocessing.get_context("spawn").Process(target=_open_elsewhere, args=(tmp_path,))
    other.start()
    other.join(60)
    assert other.exitcode == 7
    assert store.page(1, None, "asc") == []


def _open_elsewhere(folder: Path) -> None:
    try:
        VideoStore.open(folder, TTL)
    except ConfigError:
        os._exit(7)


@pytest.mark.parametrize("fault", ["a file in its place", "another version", "no database"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "videos"
    if fault == "a file in its place":
        folder.write_text("")
    else:
        VideoStore.open(folder, TTL).close()
        if fault == "no database":
            (folder / "videos.sqlite").write_bytes(b"this is no database, and long enough to be noticed" * 100)
        else:
            with sqlite3.connect(folder / "videos.sqlite") as database:
                database.execute("PRAGMA user_version = 99")
            database.close()
    for _ in range(2):  # the lock is let go of
        with pytest.raises(ConfigError, match="videos") as caught:
            VideoStore.open(folder, TTL)
        assert caught.value.param == "video_dir"
        assert "another server" not in caught.value.message


def test_a_full_database(store: VideoStore) -> None:
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFullError):
        add(store, prompt="x" * 100_000)
    assert store.page(9, None, "asc") == []
    store._database.execute("PRAGMA max_page_count = 1000000")
    add(store)


@pytest.mark.parametrize("folder", ["", " "])
def test_a_folder_without_a_name_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="must name a folder") as caught:
        VideoConfig(video_dir=folder)
    assert caught.value.param == "video_dir"

"""Video jobs and their files, kept in one folder: a database and the files, which a restart of the server survives.

    videos.sqlite    one row per job
    files/           finished videos, ID.EXTENSION
    partial/         videos that are being written; gone at the next start
    lock             held by the server that uses the folder

Synchronous, and to be used from one thread at a time. Every moment at which the process may die leaves a folder that
the next `open` brings in order: a row is written after its file is complete, and removed before it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from polymux.errors import ConfigError, StorageError, StorageFullError
from polymux.media.video_track import VideoFormat

Status = Literal["queued", "in_progress", "completed", "failed"]
Order = Literal["asc", "desc"]

VERSION = 2  # of the table; 1 had no profiles

# Names of our files, with and without a job. Others are somebody else's, whose folder this may have been before.
_OURS = re.compile(r"video_[0-9a-f]{32}\.[a-z0-9]+|[0-9a-f]{32}")


@dataclass(frozen=True)
class JobError:
    """Why a job has failed."""

    code: str
    message: str
    param: str | None = None


STOPPED = JobError("server_stopped", "the server stopped before this job was done")
LOST = JobError("file_lost", "the file is no longer there")


@dataclass(frozen=True, kw_only=True)
class VideoRecord:
    """One job, as it is kept. Ids sort by the time at which they were made."""

    id: str
    model: str
    created_at: float
    prompt: str | None
    extension: VideoFormat  # of the file, too
    fps: float
    seed: int
    status: Status = "queued"
    progress: int = 0  # per cent
    completed_at: float | None = None  # also of a job that failed
    expires_at: float | None = None
    width: int | None = None  # None: not known before it is made
    height: int | None = None
    num_frames: int | None = None
    bytes: int = 0
    error_code: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    profile: str | None = None  # as JSON, if it was asked for

    @property
    def filename(self) -> str:
        return f"{self.id}.{self.extension}"


_COLUMNS = [field.name for field in fields(VideoRecord)]


class VideoStore:
    """One open folder. `open` makes one; close it at the end."""

    def __init__(self, folder: Path, database: sqlite3.Connection, lock: int) -> None:
        self.folder = folder
        self._database = database
        self._lock = lock

    @classmethod
    def open(cls, folder: Path, ttl: float) -> Self:
        """Take the folder over, for this process alone: what another one left unfinished there has failed, and is kept
        `ttl` seconds. Raises ConfigError."""
        try:
            for path in (folder, folder / "files", folder / "partial"):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = _locked(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used for videos: {error.strerror}", param="video_dir") from None
        try:
            store = cls(folder, _database(folder / "videos.sqlite"), lock)
            store._bring_in_order(ttl)
        except (sqlite3.Error, OSError, StorageError) as error:
            os.close(lock)
            raise ConfigError(f"{folder} cannot be used for videos: {error}", param="video_dir") from None
        except BaseException:
            os.close(lock)
            raise
        return store

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    def partial(self, name: str) -> Path:
        """Where a video is written before it is complete."""
        return self.folder / "partial" / name

    def file(self, record: VideoRecord) -> Path:
        return self.folder / "files" / record.filename

    def insert(self, record: VideoRecord, max_jobs: int, max_bytes: int) -> None:
        """Raises StorageFullError if as many are kept as may be."""
        with self._writing():
            jobs, size = self._database.execute("SELECT COUNT(*), TOTAL(bytes) FROM videos").fetchone()
            if jobs >= max_jobs:
                raise StorageFullError(f"{jobs} jobs are kept: allowed are {max_jobs} (--video-max-jobs); delete some")
            if size >= max_bytes:
                kept = f"{int(size)} bytes of videos are kept"
                raise StorageFullError(f"{kept}: allowed are {max_bytes} (--video-max-bytes); delete some")
            marks = ", ".join("?" * len(_COLUMNS))
            self._database.execute(f"INSERT INTO videos VALUES ({marks})", _values(record))

    def get(self, video_id: str) -> VideoRecord | None:
        """None if there is none, or if it has expired."""
        found = self._rows("WHERE id = ? AND (expires_at IS NULL OR expires_at > ?)", video_id, time.time())
        return found[0] if found else None

    def page(self, limit: int, after: str | None, order: Order) -> list[VideoRecord]:
        """At most `limit` jobs that have not expired; `after`: the id of the last one that is known already."""
        compare, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        values: list[Any] = [time.time()]
        where = "WHERE (expires_at IS NULL OR expires_at > ?)"
        if after is not None:
            where, values = f"{where} AND id {compare} ?", [*values, after]
        return self._rows(f"{where} ORDER BY id {direction} LIMIT ?", *values, limit)

    def stored_bytes(self) -> int:
        return int(self._database.execute("SELECT TOTAL(bytes) FROM videos").fetchone()[0])

    def advance(self, video_id: str, progress: int) -> None:
        """The job runs, and has come this far. It never falls back."""
        with self._writing():
            self._database.execute(
                "UPDATE videos SET status = 'in_progress', progress = MAX(progress, ?) "
                "WHERE id = ? AND status IN ('queued', 'in_progress')",
                (progress, video_id),
            )

    def complete(self, record: VideoRecord, written: Path) -> None:
        """The file is `written`: keep it, and what `record` says about it. Raises StorageError."""
        target = self.file(record)
        size = _settle(written, target)
        try:
            self._update(replace(record, status="completed", progress=100, bytes=size))
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def fail(self, video_id: str, error: JobError, ttl: float) -> None:
        """Raises StorageError."""
        now = time.time()
        with self._writing():
            self._database.execute(
                "UPDATE videos SET status = 'failed', completed_at = ?, expires_at = ?, bytes = 0, "
                "error_code = ?, error_message = ?, error_param = ? WHERE id = ?",
                (now, expiry(now, ttl), error.code, error.message, error.param, video_id),
            )

    def delete(self, video_id: str) -> bool:
        """Row and file together. False if there was none."""
        found = self._rows("WHERE id = ?", video_id)
        try:
            gone = self._forget(video_id)
        except StorageFullError:  # the row cannot be removed for want of room: make some
            self._unlink(found)
            gone = self._forget(video_id)
        self._unlink(found)
        return gone

    def _forget(self, video_id: str) -> bool:
        with self._writing():
            return self._database.execute("DELETE FROM videos WHERE id = ?", (video_id,)).rowcount > 0

    def _unlink(self, records: Sequence[VideoRecord]) -> None:
        for record in records:
            self.file(record).unlink(missing_ok=True)

    def expire(self) -> float | None:
        """Remove what has expired. When the next job will expire, if one will."""
        for record in self._rows("WHERE expires_at <= ?", time.time()):
            self.delete(record.id)
        next_at: float | None = self._database.execute("SELECT MIN(expires_at) FROM videos").fetchone()[0]
        return next_at

    def stop_unfinished(self, ttl: float) -> None:
        """Jobs that wait or run are so no more: the server stops, or has stopped."""
        for record in self._rows("WHERE status IN ('queued', 'in_progress')"):
            self.fail(record.id, STOPPED, ttl)

    def _bring_in_order(self, ttl: float) -> None:
        """After whatever happened to the server that had the folder before."""
        self.stop_unfinished(ttl)
        for path in (self.folder / "partial").iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
        kept = {record.filename: record for record in self._rows("WHERE status = 'completed'")}
        there = {path.name for path in (self.folder / "files").iterdir()}
        for name in filter(_OURS.fullmatch, there - kept.keys()):
            (self.folder / "files" / name).unlink()
        for name in kept.keys() - there:
            self.fail(kept[name].id, LOST, ttl)

    def _rows(self, where: str, *values: Any) -> list[VideoRecord]:
        rows = self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM videos {where}", values)
        return [_record(row) for row in rows]

    def _update(self, record: VideoRecord) -> None:
        names = ", ".join(f"{name} = ?" for name in _COLUMNS)
        with self._writing():
            changed = self._database.execute(
                f"UPDATE videos SET {names} WHERE id = ?", (*_values(record), record.id)
            ).rowcount
            if not changed:
                raise StorageError(f"the job {record.id} is gone")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction. Raises StorageError for what the database cannot do."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
                kind = StorageFullError if full else StorageError
                raise kind(f"the jobs' database cannot be written: {error}") from None
            raise


def expiry(now: float, ttl: float) -> float | None:
    """When what ends now will be gone; a `ttl` of 0 is for ever."""
    return now + ttl if ttl else None


def storage_error(error: OSError) -> StorageError:
    """The error for a file that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = error.strerror or type(error).__name__
    return (StorageFullError if full else StorageError)(f"the video could not be written: {reason}")


def _locked(folder: Path) -> int:
    """The open lock file. Raises ConfigError if another process holds it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        what = f"{folder} belongs to another server that runs: choose another folder (--video-dir)"
        raise ConfigError(what, param="video_dir") from None
    return lock


def _database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA wal_autocheckpoint = 64")  # pages: the log stays small where there is little room
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, 1, VERSION):
            what = f"{path} has version {version} of the table: this polymux knows {VERSION}"
            raise ConfigError(what, param="video_dir")
        database.execute(f"CREATE TABLE IF NOT EXISTS videos (id TEXT PRIMARY KEY, {', '.join(_COLUMNS[1:])})")
        if "profile" not in {row[1] for row in database.execute("PRAGMA table_info(videos)")}:
            database.execute("ALTER TABLE videos ADD COLUMN profile")
        database.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        database.close()
        raise
    return database


def _settle(written: Path, target: Path) -> int:
    """Move a file to where it is kept, so that after a loss of power it is whole or not there. Its size."""
    try:
        with open(written, "rb+") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.replace(written, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise storage_error(error) from None
    return size


def _values(record: VideoRecord) -> tuple[Any, ...]:
    """As the table has them: seeds as text, because SQLite's integers end at 2⁶³."""
    return tuple(str(value) if name == "seed" else value for name, value in vars(record).items())


def _record(row: Sequence[Any]) -> VideoRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    return VideoRecord(**values | {"seed": int(values["seed"])})

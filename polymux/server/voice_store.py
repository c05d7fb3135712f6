"""Uploaded voices, kept in one folder: a file NAME.safetensors each, which a restart of the server survives.

A file holds either a recording (one channel) or a vector, and in its header what was said of it. It is written under
another name and appears whole, or not at all. Several servers may share a folder. Nothing is kept in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from polymux.errors import ConfigError, InvalidRequestError, StorageError, StorageFullError, VoiceNotFoundError
from polymux.media.wire import Array
from polymux.server_config import VoiceConfig

logger = logging.getLogger("polymux.server")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX, _HEADER, _TENSOR = ".safetensors", "voice", "voice"
_PARTIAL = ".partial-"


@dataclass(frozen=True, kw_only=True)
class VoiceRecord:
    """One voice, as it is kept: a recording has a rate, a vector has none."""

    name: str
    consent: str
    created_at: int
    ref_text: str | None = None
    speaker_description: str | None = None
    sample_rate: int | None = None
    seconds: float | None = None
    embedding_dim: int | None = None
    file_size: int = 0  # known when it is stored


def check_name(name: str) -> None:
    """Raises InvalidRequestError for a name that could not be that of a file, and of no other one."""
    if not NAME.fullmatch(name):
        allowed = "must be 1 to 64 letters, digits and ._-, and begin with a letter or digit"
        raise InvalidRequestError(f"name={name[:80]!r}: {allowed}", param="name")


class Voices:
    """One folder. Synchronous; any thread may call it."""

    def __init__(self, config: VoiceConfig, folder: Path | None) -> None:
        """`folder` None: one that is removed at the end."""
        self._most = config.max_uploaded_voices
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._opening = threading.Lock()

    def open(self) -> Path:
        """Make the folder, if it is not there. Raises ConfigError."""
        with self._opening:
            if self._folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="polymux-voices-")
                self._folder = Path(self._temporary.name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._alone(self._folder):
                for left in self._folder.glob(f"{_PARTIAL}*"):  # by a server that died
                    left.unlink(missing_ok=True)
        except OSError as error:
            what = f"{self._folder} cannot be used for voices: {error.strerror}"
            raise ConfigError(what, param="voice_store") from None
        return self._folder

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def all(self) -> list[VoiceRecord]:
        """By name. Files that are no voices are left out, and named in the log."""
        if self._folder is None or not self._folder.is_dir():
            return []
        names = sorted(path.name.removesuffix(_SUFFIX) for path in self._folder.glob(f"*{_SUFFIX}"))
        found = []
        for name in filter(NAME.fullmatch, names):
            try:
                found.append(self._read(name, with_values=False)[0])
            except VoiceNotFoundError:  # deleted in between
                continue
            except StorageError as error:
                logger.warning("%s", error)
        return found

    def has(self, name: str) -> bool:
        return self._folder is not None and bool(NAME.fullmatch(name)) and self._path(name).is_file()

    def get(self, name: str) -> tuple[VoiceRecord, Array]:
        """With its float32 values: (1, samples), or (size,). Raises VoiceNotFoundError, StorageError."""
        return self._read(name, with_values=True)

    def add(self, record: VoiceRecord, values: Array) -> VoiceRecord:
        """Keep it. Raises InvalidRequestError if there is one of this name, StorageFullError if there are too many."""
        check_name(record.name)
        header = {_HEADER: json.dumps(asdict(replace(record, file_size=0)))}
        data = save({_TENSOR: np.ascontiguousarray(values, dtype=np.float32)}, header)
        folder = self.open() if self._folder is None or not self._folder.is_dir() else self._folder
        partial, target = folder / f"{_PARTIAL}{secrets.token_hex(8)}", self._path(record.name)
        try:
            with self._alone(folder):
                self._check_room(folder, record.name)
                with open(partial, "xb", opener=_private) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, target)
                _sync(folder)
        except OSError as error:
            raise _storage_error(error) from None
        finally:
            partial.unlink(missing_ok=True)
        return replace(record, file_size=len(data))

    def delete(self, name: str) -> None:
        """Raises VoiceNotFoundError."""
        if not self.has(name):
            raise _unknown(name)
        folder = self._path(name).parent
        try:
            with self._alone(folder):
                self._path(name).unlink()
                _sync(folder)
        except FileNotFoundError:
            raise _unknown(name) from None
        except OSError as error:
            raise _storage_error(error) from None

    def _check_room(self, folder: Path, name: str) -> None:
        if self._path(name).exists():
            raise InvalidRequestError(f"name={name!r}: there is such a voice; delete it first", param="name")
        count = sum(1 for _ in folder.glob(f"*{_SUFFIX}"))
        if count >= self._most:
            allowed = f"allowed are {self._most} (--max-uploaded-voices); delete some"
            raise StorageFullError(f"{count} voices are kept: {allowed}")

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{_SUFFIX}"

    def _read(self, name: str, *, with_values: bool) -> tuple[VoiceRecord, Array]:
        if not self.has(name):
            raise _unknown(name)
        path = self._path(name)
        try:
            with safe_open(path, framework="numpy") as file:
                record = VoiceRecord(**json.loads((file.metadata() or {})[_HEADER]))
                values: Array = file.get_tensor(_TENSOR) if with_values else np.empty(0, np.float32)
            return replace(record, name=name, file_size=path.stat().st_size), values
        except FileNotFoundError:
            raise _unknown(name) from None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StorageError(f"the voice {name!r} cannot be read: {error}") from None

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """While nobody else writes in the folder, no other server either."""
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _sync(folder: Path) -> None:
    """So that a name survives a loss of power, or its removal does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unknown(name: str) -> VoiceNotFoundError:
    return VoiceNotFoundError(f"name={name[:80]!r}: no such voice was uploaded", param="name")


def _storage_error(error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = error.strerror or type(error).__name__
    return (StorageFullError if full else StorageError)(f"the voice could not be written: {reason}")

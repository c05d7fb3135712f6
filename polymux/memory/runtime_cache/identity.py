"""What determines the final bytes of a component's weights, and a digest of it: the name of its cache entry.

Two workers with equal identities would load equal bytes, so they may share a file. Data-parallel and
sequence-parallel ranks are left out on purpose: they hold the same weights. So is the checkpoint's path.

Hashing tens of gigabytes at every start would cost what the cache saves. Files above `WHOLE_BELOW` are therefore
recognised by size, times of last change and samples of their content. The time of status change (ctime) cannot be set
by a program: as long as the clock runs forward, no write to a file on a local disk leaves it as it was. What this
cannot see is a change below the file system, a clock set back to the very nanosecond, or a network file system that
reports a change late; against those, the samples help where the change is not confined to what lies between them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from polymux.errors import CheckpointError
from polymux.memory.runtime_cache.layout import FORMAT_VERSION

WHOLE_BELOW = 8 * 2**20  # bytes; smaller files are hashed from end to end, and their times do not matter
SAMPLES = 32
SAMPLE_BYTES = 4096
_LONGEST_HEADER = 16 * 2**20  # bytes of a safetensors header that are hashed


class SourceFile(msgspec.Struct, frozen=True):
    """What is known of one file without reading all of it. `name` is relative to the component's folder."""

    name: str
    size: int
    content: str  # digest of the whole file, or of its head and samples
    changed_ns: tuple[int, int] | None  # mtime and ctime; None if the digest covers the whole file


class Adapter(msgspec.Struct, frozen=True):
    """An adapter that is fused into the weights when they are loaded."""

    files: tuple[SourceFile, ...]
    scale: float


class Identity(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """All that determines the bytes. Values are compared; what they mean is not known here."""

    model_class: str  # module and name
    sources: tuple[SourceFile, ...]
    libraries: tuple[tuple[str, str], ...]  # whose code turns the sources into weights: name and version
    blocks: tuple[str, ...]  # the paths of the blocks, in order
    dtype: str
    tensor_parallel: tuple[int, int] = (1, 0)  # size and rank
    quantization: str | None = None
    adapters: tuple[Adapter, ...] = ()  # in the order in which they are fused
    made_up: str | None = None  # how the weights are made if there are none to load
    format_version: int = FORMAT_VERSION

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


def source_files(folder: Path, files: Iterable[Path]) -> tuple[SourceFile, ...]:
    """The files, sorted by name, as they are now. Raises CheckpointError if one cannot be read."""
    try:
        return tuple(source_file(file, file.relative_to(folder).as_posix()) for file in sorted(set(files)))
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None


def source_file(path: Path, name: str) -> SourceFile:
    """One file as it is now. Links are followed. Raises OSError."""
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        if status.st_size < WHOLE_BELOW:
            return SourceFile(name, status.st_size, hashlib.file_digest(stream, "sha256").hexdigest(), None)
        content = _sampled(stream.fileno(), status.st_size)
        return SourceFile(name, status.st_size, content, (status.st_mtime_ns, status.st_ctime_ns))


def _sampled(fd: int, size: int) -> str:
    """A digest of the head (all of a safetensors header, if it is one) and of samples spread over the file."""
    prefix = int.from_bytes(os.pread(fd, 8, 0), "little")
    head = 8 + prefix if prefix <= _LONGEST_HEADER else SAMPLE_BYTES
    digest = hashlib.sha256(os.pread(fd, head, 0))
    for k in range(SAMPLES):
        digest.update(os.pread(fd, SAMPLE_BYTES, (size - SAMPLE_BYTES) * k // (SAMPLES - 1)))
    return digest.hexdigest()

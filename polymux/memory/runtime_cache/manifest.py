"""An entry's manifest: what its weight file must be, and what it was made from.

The manifest carries a digest of itself, of the file's header and of every block, so that any flipped byte is found.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from polymux.errors import CacheError
from polymux.memory.runtime_cache.identity import Identity
from polymux.memory.runtime_cache.layout import FORMAT, FORMAT_VERSION

WEIGHTS = "weights.safetensors"
MANIFEST = "manifest.json"
_MAX_BYTES = 64 * 2**20


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`label` says to people whose weights these are; nothing depends on it."""

    label: str
    identity: Identity
    file_size: int
    header_sha256: str
    blocks_sha256: tuple[tuple[str, str], ...]  # block name and digest of its range, padding included
    written_by: str
    written_at: float  # seconds since 1970


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    sha256: str
    manifest: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    sealed = _Sealed(FORMAT, FORMAT_VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    return msgspec.json.encode(sealed)


def read_manifest(file: Path) -> Manifest:
    """Raises CacheError if the file is missing, damaged, or of another format."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES)
    except OSError as error:
        raise CacheError(f"{file}: cannot be read: {error.strerror or error}") from None
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if (sealed.format, sealed.version) != (FORMAT, FORMAT_VERSION):
            raise CacheError(f"{file}: of format {sealed.format!r} {sealed.version}, not {FORMAT!r} {FORMAT_VERSION}")
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            raise CacheError(f"{file}: damaged: its digest does not fit")
        return msgspec.json.decode(sealed.manifest, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CacheError(f"{file}: damaged: {error}") from None

"""Files of one folder of this machine, for servers whose operator allows it.

A path is walked folder by folder from the open root, and no symbolic link is followed, so nothing can be exchanged
between a check and the opening. Blocking; call it in a thread.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from polymux.errors import ConfigError, InvalidRequestError


class LocalSource:
    """Regular files below `root`."""

    def __init__(self, root: str) -> None:
        """Raises ConfigError unless `root` is a folder that can be read."""
        given = Path(root).expanduser().absolute()
        self._roots = (PurePosixPath(given), PurePosixPath(given.resolve()))
        if not given.is_dir() or not os.access(given, os.R_OK | os.X_OK):
            message = f"allowed_local_media_path={root!r}: must be a folder that can be read"
            raise ConfigError(message, param="allowed_local_media_path")

    def read(self, source: str, *, param: str, max_bytes: int) -> bytes:
        """The file that a file URL or a path names; a relative path counts from the root.

        Raises InvalidRequestError that names `param`.
        """
        parts = self._below_root(_path_of(source, param), param)
        try:
            with open(self._open(parts), "rb") as file:
                data = file.read(max_bytes + 1)
        except (OSError, ValueError):
            raise _refuse(param, "there is no such file in the folder that is allowed") from None
        if len(data) > max_bytes:
            raise _refuse(param, f"the file has more than {max_bytes} bytes")
        return data

    def _below_root(self, path: PurePosixPath, param: str) -> tuple[str, ...]:
        if not path.is_absolute():
            parts = path.parts
        else:
            root = next((root for root in self._roots if path.is_relative_to(root)), None)
            parts = () if root is None else path.relative_to(root).parts
        if not parts or ".." in parts:
            raise _refuse(param, "the path is not in the folder that is allowed (--allowed-local-media-path)")
        return parts

    def _open(self, parts: tuple[str, ...]) -> int:
        """Raises OSError, also for a symbolic link anywhere below the root, and for what is not a regular file."""
        folder = os.open(self._roots[1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in parts[:-1]:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(name, flags, dir_fd=folder)
                os.close(folder)
                folder = inner
            # Not blocking: the file may turn out to be a pipe, which is refused when it is open.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            file = os.open(parts[-1], flags, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError("not a regular file")
        return file


def _path_of(source: str, param: str) -> PurePosixPath:
    if source[:5].lower() != "file:":
        return PurePosixPath(source)
    try:
        url = urlsplit(source)
        path = unquote(url.path, errors="strict")
    except ValueError:
        raise _refuse(param, "not a valid file URL") from None
    if url.netloc not in ("", "localhost") or url.query or url.fragment or not path.startswith("/"):
        raise _refuse(param, "not a valid file URL: file:///PATH")
    return PurePosixPath(path)


def _refuse(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}", param=param)

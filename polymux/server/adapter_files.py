"""The adapters that clients may name: files in the folders of --allowed-lora-path, wherever links lead.

Whether a file fits the model is found out where it is loaded, at its first use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from polymux.errors import ConfigError, InvalidRequestError
from polymux.request import LoRARequest
from polymux.server.protocol import AdapterField
from polymux.server_config import AdapterFilesConfig

MAX_NAMES = 1000
LISTED = 20  # names in an error


class AdapterFiles:
    """The files that clients may name, and the names that some of them have been given."""

    def __init__(self, config: AdapterFilesConfig) -> None:
        """Raises ConfigError if a folder is none."""
        self._folders = [os.path.realpath(folder) for folder in config.allowed_lora_path]
        for given, folder in zip(config.allowed_lora_path, self._folders, strict=True):
            if not os.path.isdir(folder):
                raise ConfigError(f"allowed_lora_path={given!r}: there is no such folder", param="allowed_lora_path")
        self.named: dict[str, str] = {}  # real paths

    def chosen(self, asked: Sequence[AdapterField]) -> tuple[LoRARequest, ...]:
        """What a request asks for. Raises InvalidRequestError."""
        return tuple(LoRARequest(path=self._path_of(one), scale=one.scale, component=one.component) for one in asked)

    def name(self, name: str, path: str) -> None:
        """Give a file a name. Raises InvalidRequestError."""
        if name in self.named:
            raise InvalidRequestError(f"lora_name={name[:80]!r}: is in use; unload it first", param="lora_name")
        if len(self.named) >= MAX_NAMES:
            what = f"{len(self.named)} names are in use, as many as there may be; unload one first"
            raise InvalidRequestError(f"lora_name={name[:80]!r}: {what}", param="lora_name")
        self.named[name] = self._allowed(path, "lora_path")

    def forget(self, name: str) -> None:
        """Raises InvalidRequestError."""
        if self.named.pop(name, None) is None:
            raise InvalidRequestError(f"lora_name={name[:80]!r}: no adapter has this name", param="lora_name")

    def _path_of(self, asked: AdapterField) -> str:
        if (asked.name is None) == (asked.path is None):
            raise InvalidRequestError("lora: give either name or path", param="lora")
        if asked.name is None:
            return self._allowed(asked.path or "", "lora")
        if asked.name not in self.named:
            known = ", ".join(name[:80] for name in sorted(self.named)[:LISTED]) or "none"
            if len(self.named) > LISTED:
                known += f" and others, {len(self.named)} in all"
            raise InvalidRequestError(f"lora.name={asked.name[:80]!r}: known are {known}", param="lora")
        return self.named[asked.name]

    def _allowed(self, path: str, param: str) -> str:
        """The real path: an absolute one, or one below one of the folders."""
        if not self._folders:
            raise InvalidRequestError(f"{param}: files are not served here (--allowed-lora-path)", param=param)
        for folder in self._folders if path and "\0" not in path else ():
            real = os.path.realpath(os.path.join(folder, path))
            if _is_below(folder, real) and os.path.exists(real) and _stays_below(folder, real):
                return real
        raise InvalidRequestError(
            f"{param}={path[:80]!r}: there is no such file in the folders of --allowed-lora-path", param=param
        )


def _is_below(folder: str, real: str) -> bool:
    return real.startswith(folder.rstrip(os.sep) + os.sep)


def _stays_below(folder: str, real: str) -> bool:
    """Whether nothing in `real`, if that is a folder too, is a link that leads out: whoever loads it follows links."""
    if not os.path.isdir(real):
        return True
    try:
        with os.scandir(real) as entries:
            return all(_is_below(folder, os.path.realpath(entry)) for entry in entries if entry.is_symlink())
    except OSError:  # not ours to read
        return False

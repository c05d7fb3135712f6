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
            known = ", ".join(sorted(self.named)) or "none"
            raise InvalidRequestError(f"lora.name={asked.name[:80]!r}: known are {known}", param="lora")
        return self.named[asked.name]

    def _allowed(self, path: str, param: str) -> str:
        """The real path: an absolute one, or one below one of the folders."""
        if not self._folders:
            raise InvalidRequestError(f"{param}: files are not served here (--allowed-lora-path)", param=param)
        for folder in self._folders if path and "\0" not in path else ():
            real = os.path.realpath(os.path.join(folder, path))
            if real.startswith(folder.rstrip(os.sep) + os.sep) and os.path.exists(real):
                return real
        raise InvalidRequestError(
            f"{param}={path[:80]!r}: there is no such file in the folders of --allowed-lora-path", param=param
        )

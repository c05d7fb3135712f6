"""Extra files beside the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Files:
    """Writes them when the checkpoint is saved."""

    def __init__(self, write: Callable[[Path], None]) -> None:
        self._write = write

    def save_pretrained(self, save_directory: Path, **kwargs: Any) -> None:
        self._write(save_directory)

"""Traces of a stage process: what its thread and its device do between a start and a stop, in Chrome's format.

Knows torch's profiler; nothing of requests. What runs is slower while it is noted; notes are in memory until the stop.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from polymux.errors import ConfigError, InvalidRequestError
from polymux.profiler_config import TorchProfiler


class Profiler:
    """One trace at a time."""

    def __init__(self, settings: TorchProfiler) -> None:
        self._settings = settings
        self._running: tuple[profile, Path] | None = None

    def start(self, prefix: str) -> None:
        """Raises InvalidRequestError if one is running, ConfigError if its file cannot be written."""
        if self._running is not None:
            raise InvalidRequestError("profiling is under way: stop it first", param="profile_prefix")
        folder = Path(self._settings.torch_profiler_dir).expanduser()
        file = folder / f"{prefix}-{os.getpid()}.pt.trace.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.touch(exist_ok=False)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}", param="profiler_config") from None
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        made = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            record_shapes=self._settings.torch_profiler_record_shapes,
            profile_memory=self._settings.torch_profiler_with_memory,
            with_stack=self._settings.torch_profiler_with_stack,
        )
        made.start()
        self._running = made, file

    def stop(self) -> Path:
        """The file. Raises InvalidRequestError if none is running."""
        if self._running is None:
            raise InvalidRequestError("profiling is not under way")
        (made, file), self._running = self._running, None
        made.stop()
        made.export_chrome_trace(str(file))
        return file

"""The knob of profiling: whether, and where traces are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from polymux.errors import ConfigError
from polymux.knobs import Checked, knob


class TorchProfiler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What torch's profiler notes, and the folder for its traces."""

    profiler: Literal["torch"]
    torch_profiler_dir: str
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_stack: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig(Checked):
    """Profiling: traces of what the model's processes do (docs/profiling.md)"""

    profiler_config: dict[str, Any] | None = knob(
        None, "profiler and torch_profiler_dir: have traces written", metavar="JSON"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.torch

    @property
    def torch(self) -> TorchProfiler | None:
        """None: there is no profiling. Raises ConfigError."""
        if self.profiler_config is None:
            return None
        try:
            return msgspec.convert(self.profiler_config, TorchProfiler, strict=True)
        except msgspec.ValidationError as error:
            allowed = ", ".join(TorchProfiler.__struct_fields__)
            raise ConfigError(f"profiler_config: {error}; allowed are {allowed}", param="profiler_config") from None

"""The knobs of compilation: whether the denoisers' blocks are compiled, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from polymux.errors import ConfigError
from polymux.knobs import Checked, conflict, knob

Backend = Literal["inductor", "aot_eager", "eager"]
Mode = Literal["default", "max-autotune-no-cudagraphs"]

_VALUES = {
    "backend": ", ".join(get_args(Backend)),
    "mode": ", ".join(get_args(Mode)),
    "dynamic": "true, false and null",
    "cache_dir": "a path",
}


class Compilation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How torch.compile is called. `dynamic` true: one graph for all sizes; null: one for the first size and one for
    all others; false: one for each size. `cache_dir` holds what was compiled, for later starts."""

    backend: Backend = "inductor"
    mode: Mode = "default"
    dynamic: bool | None = True
    cache_dir: str | None = None

    @property
    def summary(self) -> str:
        """For people."""
        sizes = {True: "one graph for all sizes", None: "sizes as torch decides", False: "a graph for each size"}
        mode = f", {self.mode}" if self.mode != "default" else ""
        return f"{self.backend}{mode}, {sizes[self.dynamic]}"


@dataclass(frozen=True, kw_only=True)
class CompilationConfig(Checked):
    """Compilation: the denoisers' repeated blocks as compiled code (docs/compile.md)"""

    enforce_eager: bool | None = knob(
        None, "run blocks as they are; by default they are compiled on a GPU alone", off="--no-enforce-eager"
    )
    compilation_config: dict[str, Any] = knob(
        {}, "backend, mode, dynamic, cache_dir: have blocks compiled so", metavar="JSON"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enforce_eager and self.compilation_config:
            raise conflict("enforce_eager", "compilation_config", "one says not to compile, the other how to")
        _ = self.settings

    @property
    def settings(self) -> Compilation:
        """Raises ConfigError."""
        try:
            made = msgspec.convert(self.compilation_config, Compilation, strict=True)
        except msgspec.ValidationError as error:
            wrong = re.search(r"\$\.(\w+)`$", str(error))
            allowed = _VALUES[wrong[1]] if wrong else ", ".join(_VALUES)
            raise _refusal(f"{error}; allowed: {allowed}") from None
        if made.backend != "inductor":
            for name in ("mode", "cache_dir"):
                if name in self.compilation_config:
                    raise _refusal(f"{name} acts only with the backend inductor")
        return made

    @property
    def asked_by(self) -> str | None:
        """The flag that asks for compilation, if one does."""
        if self.compilation_config:
            return "compilation_config"
        return "enforce_eager" if self.enforce_eager is False else None

    def choice(self, device: str) -> tuple[Compilation | None, str]:
        """How to compile for a device of this type, and why; None: not at all."""
        if self.enforce_eager:
            return None, "--enforce-eager"
        if self.compilation_config:
            return self.settings, "--compilation-config"
        if self.enforce_eager is False:
            return self.settings, "--no-enforce-eager"
        if device == "cuda":
            return self.settings, "on a GPU, unless --enforce-eager says otherwise"
        return None, "on a CPU, unless --no-enforce-eager or --compilation-config says otherwise"


def _refusal(message: str) -> ConfigError:
    return ConfigError(f"compilation_config: {message}", param="compilation_config")

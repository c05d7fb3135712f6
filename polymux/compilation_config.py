"""The knobs of how denoisers run: whether their blocks are compiled, and which calls are recorded as CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from polymux.errors import ConfigError
from polymux.knobs import Checked, conflict, knob

Backend = Literal["inductor", "aot_eager", "eager"]
Mode = Literal["default", "max-autotune-no-cudagraphs"]

_OF_BLOCKS = {
    "backend": ", ".join(get_args(Backend)),
    "mode": ", ".join(get_args(Mode)),
    "dynamic": "true, false and null",
    "cache_dir": "a path",
}
_OF_AUTO = {  # settings of graphs that say what "auto" takes for small
    "cudagraph_max_tokens": "numbers from 1",
    "cudagraph_max_model_gib": "numbers above 0",
}
_OF_GRAPHS = _OF_AUTO | {"cudagraph_max_graphs": "numbers from 1", "cudagraph_max_gib": "numbers above 0"}
_VALUES = _OF_BLOCKS | {"cudagraphs": '"auto", true and false'} | _OF_GRAPHS


class Compilation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How torch.compile is called. `dynamic` true: one graph for all sizes; null: one for the first size and one for
    all others; false: one for each size. `cache_dir` holds what was compiled, for later starts.

    cudagraphs: whether calls of denoisers are recorded as CUDA graphs. "auto": those of small ones, by the two that
    follow: of at most so many latent tokens, and of a denoiser of at most so many GiB.
    cudagraph_max_graphs, cudagraph_max_gib: how many are kept at a time, and the device memory beyond which no further
    one is recorded.
    """

    backend: Backend = "inductor"
    mode: Mode = "default"
    dynamic: bool | None = True
    cache_dir: str | None = None
    cudagraphs: Literal["auto"] | bool = "auto"
    cudagraph_max_tokens: Annotated[int, Meta(ge=1)] = 8192
    cudagraph_max_model_gib: Annotated[float, Meta(gt=0)] = 4.0
    cudagraph_max_graphs: Annotated[int, Meta(ge=1)] = 16
    cudagraph_max_gib: Annotated[float, Meta(gt=0)] = 2.0

    @property
    def summary(self) -> str:
        """Of how blocks are compiled, for people."""
        sizes = {True: "one graph for all sizes", None: "sizes as torch decides", False: "a graph for each size"}
        mode = f", {self.mode}" if self.mode != "default" else ""
        return f"{self.backend}{mode}, {sizes[self.dynamic]}"


@dataclass(frozen=True, kw_only=True)
class CompilationConfig(Checked):
    """Compilation: the denoisers' blocks as compiled code, and small denoisers as CUDA graphs (docs/compile.md)"""

    enforce_eager: bool | None = knob(
        None, "run blocks as they are; by default they are compiled on a GPU alone", off="--no-enforce-eager"
    )
    compilation_config: dict[str, Any] | None = knob(
        None,
        "backend, mode, dynamic, cache_dir: have blocks compiled so; cudagraphs, cudagraph_...: calls as CUDA graphs",
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enforce_eager and self._describes_blocks:
            raise conflict("enforce_eager", "compilation_config", "one says not to compile, the other how to")
        if self.settings.cudagraphs == "auto" and self.enforce_eager:
            _check_absent(
                self.compilation_config or {}, _OF_GRAPHS, "does not act with enforce_eager, without cudagraphs"
            )

    @property
    def _describes_blocks(self) -> bool:
        """Whether the object says that blocks are to be compiled; one with settings of CUDA graphs alone does not."""
        given = self.compilation_config
        return given is not None and (not given or any(name in given for name in _OF_BLOCKS))

    @property
    def settings(self) -> Compilation:
        """Raises ConfigError."""
        given = self.compilation_config or {}
        try:
            made = msgspec.convert(given, Compilation, strict=True)
        except msgspec.ValidationError as error:
            wrong = re.search(r"\$\.(\w+)`$", str(error))
            allowed = _VALUES[wrong[1]] if wrong else ", ".join(_VALUES)
            raise _refusal(f"{error}; allowed: {allowed}") from None
        if made.backend != "inductor":
            _check_absent(given, ("mode", "cache_dir"), "acts only with the backend inductor")
        if made.cudagraphs is False:
            _check_absent(given, _OF_GRAPHS, "acts only with cudagraphs")
        elif made.cudagraphs is True:
            _check_absent(given, _OF_AUTO, 'acts only with cudagraphs "auto"')
        return made

    @property
    def asked_by(self) -> str | None:
        """The flag that asks for compilation, if one does."""
        if self._describes_blocks:
            return "compilation_config"
        return "enforce_eager" if self.enforce_eager is False else None

    def choice(self, device: str) -> tuple[Compilation | None, str]:
        """How to compile for a device of this type, and why; None: not at all."""
        if self.enforce_eager:
            return None, "--enforce-eager"
        if self._describes_blocks:
            return self.settings, "--compilation-config"
        if self.enforce_eager is False:
            return self.settings, "--no-enforce-eager"
        if device == "cuda":
            return self.settings, "on a GPU, unless --enforce-eager says otherwise"
        return None, "on a CPU, unless --no-enforce-eager or --compilation-config says otherwise"

    def graphs(self, device: str) -> tuple[Compilation | None, str]:
        """How calls are recorded as CUDA graphs on a device of this type, and why; None: not at all."""
        settings = self.settings
        if settings.cudagraphs != "auto":
            return settings if settings.cudagraphs else None, "--compilation-config"
        if self.enforce_eager:
            return None, "--enforce-eager"
        if device == "cuda":
            return settings, "on a GPU, of what is small"
        return None, "a CPU has none"


def _check_absent(given: dict[str, Any], names: Iterable[str], why: str) -> None:
    for name in names:
        if name in given:
            raise _refusal(f"{name} {why}")


def _refusal(message: str) -> ConfigError:
    return ConfigError(f"compilation_config: {message}", param="compilation_config")

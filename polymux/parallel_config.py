"""On how many processes one model runs, and what that goes together with. Knows neither processes nor tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from polymux.errors import ConfigError
from polymux.knobs import Checked, knob


@dataclass(frozen=True, kw_only=True)
class DiffusionParallelConfig(Checked):
    """Parallel: several processes, each with a device of its own, work on every request (docs/parallel.md)"""

    cfg_parallel_size: int = knob(1, "ranks that share the guidance calls of each step", minimum=1, maximum=3)

    @property
    def degrees(self) -> dict[str, int]:
        """The sizes that are not 1, by the knob that sets them."""
        named = {"cfg_parallel_size": self.cfg_parallel_size}
        return {name: size for name, size in named.items() if size != 1}

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        size = 1
        for degree in self.degrees.values():
            size *= degree
        return size

    def describe(self) -> str:
        """`4 ranks (cfg_parallel_size 2 x ...)`."""
        factors = " x ".join(f"{name} {size}" for name, size in self.degrees.items())
        return f"{self.world_size} ranks ({factors})" if factors else "1 rank"

    def check_beside(self, *, cache_backend: str, dlo_use_allgather: bool | None) -> None:
        """Raise ConfigError for what does not go together with several ranks, before any process is started."""
        if self.world_size == 1:
            return
        what = " and ".join(f"--{name.replace('_', '-')} {size}" for name, size in self.degrees.items())
        if cache_backend != "none":
            why = "what a cache remembers of a step is on the rank that has computed it"
            raise ConfigError(f"--cache-backend {cache_backend} and {what}: {why}", param="cache_backend")
        if dlo_use_allgather:
            why = "ranks that compute different calls cannot gather the blocks of one"
            raise ConfigError(f"--dlo-use-allgather and {what}: {why}", param="dlo_use_allgather")


def flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the knobs of a `parallel_config`, if there is one among them, in its place."""
    if "parallel_config" not in values:
        return values
    rest = {name: value for name, value in values.items() if name != "parallel_config"}
    config = values["parallel_config"]
    if not isinstance(config, DiffusionParallelConfig):
        raise ConfigError(f"parallel_config={config!r}: must be a DiffusionParallelConfig", param="parallel_config")
    own = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if twice := sorted(own.keys() & rest.keys()):
        raise ConfigError(f"{twice[0]} is given beside parallel_config, which has it too", param=twice[0])
    return rest | own

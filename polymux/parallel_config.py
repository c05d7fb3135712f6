"""On how many processes one model runs, and what that goes together with. Knows neither processes nor tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymux.errors import ConfigError
from polymux.knobs import Checked, flag_of, knob

MOST_RANKS = 256  # all on this host
DEGREES = ("cfg_parallel_size", "ring_degree", "ulysses_degree", "tensor_parallel_size")  # from the outermost

_OFFLOAD = (
    "enable_cpu_offload",
    "enable_layerwise_offload",
    "enable_distributed_layerwise_offload",
    "gpu_memory_limit_gib",
)
_PACKED = ("quantization", "diffusion_quantization_config", "gguf_file")
# Knobs of this group, others, and why they do not go together.
_REFUSED: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (DEGREES, ("cache_backend",), "what a cache remembers of a step is on the rank that has computed it"),
    (("tensor_parallel_size", "use_hsdp"), _OFFLOAD, "each rank keeps its part of the weights on its device"),
    (
        ("tensor_parallel_size", "use_hsdp", "text_encoder_tp_size"),
        ("lora_path",),
        "an adapter is made for whole layers",
    ),
    (("tensor_parallel_size", "use_hsdp"), _PACKED, "packed weights are not divided"),
    (DEGREES, ("diffusion_attention_config",), "block-sparse attention looks at whole sequences and all heads"),
    (("tensor_parallel_size",), ("use_hsdp",), "each of them divides the weights"),
    (DEGREES, ("merge_decoding", "decoding"), "with several ranks answers are decoded paged"),
    (DEGREES, ("decode_graphs",), "steps of several ranks are captured as they are, plain, or not at all"),
)


@dataclass(frozen=True, kw_only=True)
class DiffusionParallelConfig(Checked):
    """Parallel: several processes, each with a device of its own, work on every request (docs/parallel.md)"""

    cfg_parallel_size: int = knob(1, "ranks that share the guidance calls of each step", minimum=1, maximum=3)
    ulysses_degree: int = knob(
        1, "ranks that share the tokens of each step, and in attention its heads", minimum=1, alias="--usp"
    )
    ring_degree: int = knob(
        1, "ranks that share the tokens of each step, and in attention pass keys on", minimum=1, alias="--ring"
    )
    tensor_parallel_size: int = knob(
        1, "ranks that share every layer of the denoisers, or of a language model", minimum=1
    )
    use_hsdp: bool = knob(False, "each rank keeps a part of every block of the denoisers, and gathers it to compute it")
    hsdp_shard_size: int = knob(-1, "ranks among which blocks are shared out; -1: all", minimum=-1)
    hsdp_replicate_size: int = knob(1, "groups of such ranks, each with all of the weights", minimum=1)
    vae_patch_parallel_size: int = knob(
        1, "ranks that share the tiles of the autoencoder, which works tile by tile then: 1, or all", minimum=1
    )
    text_encoder_tp_size: int = knob(1, "ranks that share every layer of the text encoders: 1, or all", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size > MOST_RANKS:
            raise ConfigError(f"{self.describe()}: at most {MOST_RANKS} are allowed", param=next(iter(self.degrees)))
        if self.use_hsdp:
            self._check_hsdp()
        for name in ("hsdp_shard_size", "hsdp_replicate_size"):
            if name in self.changed and not self.use_hsdp:
                raise ConfigError(f"{flag_of(name)} acts only with --use-hsdp", param=name)
        for name in ("vae_patch_parallel_size", "text_encoder_tp_size"):
            if (size := getattr(self, name)) not in (1, self.world_size):
                what = f"{flag_of(name)} {size}: allowed are 1 and all ranks; there are {self.describe()}"
                raise ConfigError(what, param=name)
        self.check_beside({name: getattr(self, name) for name in self.changed})

    @property
    def changed(self) -> list[str]:
        """The knobs that are not at their defaults."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]

    @property
    def degrees(self) -> dict[str, int]:
        """The sizes that make up the ranks, by the knob that sets them."""
        return {name: getattr(self, name) for name in DEGREES if getattr(self, name) != 1}

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.degrees.values())

    @property
    def divides_weights(self) -> bool:
        """Whether a rank has only a part of them."""
        return self.tensor_parallel_size > 1 or self.use_hsdp or self.text_encoder_tp_size > 1

    @property
    def divides_denoisers(self) -> bool:
        """Whether ranks share a call of a denoiser, and talk to each other in it."""
        return max(self.tensor_parallel_size, self.ulysses_degree, self.ring_degree) > 1 or self.use_hsdp

    def describe(self) -> str:
        """`4 ranks (cfg_parallel_size 2 x ...)`."""
        factors = " x ".join(f"{name} {size}" for name, size in self.degrees.items())
        return f"{self.world_size} ranks ({factors})" if factors else "1 rank"

    def check_beside(self, others: Mapping[str, object]) -> None:
        """Raise ConfigError if one of these other settings does not go together with one of these. Before any process
        is started."""
        mine = self.changed
        for own, theirs, why in _REFUSED:
            for name in own:
                for other in theirs:
                    if name in mine and others.get(other) and others[other] != "none":
                        raise ConfigError(f"{flag_of(name)} and {flag_of(other)} exclude each other: {why}", param=name)

    def _check_hsdp(self) -> None:
        if self.world_size == 1:
            what = "--use-hsdp acts only with several ranks: --cfg-parallel-size, --ulysses-degree or --ring-degree"
            raise ConfigError(what, param="use_hsdp")
        if self.hsdp_replicate_size * self.hsdp_shards != self.world_size:
            sizes = f"--hsdp-shard-size {self.hsdp_shard_size} x --hsdp-replicate-size {self.hsdp_replicate_size}"
            raise ConfigError(f"{sizes} must be all ranks; there are {self.describe()}", param="hsdp_shard_size")

    @property
    def hsdp_shards(self) -> int:
        """Among how many ranks a block is shared out."""
        return self.world_size // self.hsdp_replicate_size if self.hsdp_shard_size == -1 else self.hsdp_shard_size


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

"""Which models of transformers run on several ranks, and with which settings: before any process is started, too.

Knows classes by their names, and settings; no torch.
"""

from __future__ import annotations

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.families import generate_family_of
from polymux.families.chat import ChatFamily
from polymux.knobs import check_unchanged, conflict

DIVIDES = "tensor_parallel_size"


def check_ranks(config: EngineConfig, name: str) -> None:
    """Raise ConfigError if a model of this class of transformers cannot run on as many ranks as are asked for."""
    family, parallel = generate_family_of(name), config.parallel
    if not parallel.changed or config.decoding.elsewhere:
        return
    if not isinstance(family, ChatFamily) or name not in family.paged or family.takes:
        what = f"{name} runs on one rank; of transformers' models only some language models do not (docs/ar_engine.md)"
        raise ConfigError(f"{parallel.describe()}: {what}", param=parallel.changed[0])
    others = [knob for knob in parallel.changed if knob != DIVIDES]
    check_unchanged(
        parallel, f"acts only on pipelines of diffusers; {name} is divided by --tensor-parallel-size", others
    )
    if config.workers.ray:
        raise conflict(DIVIDES, "worker_backend", f"the ranks of {name} are processes of one host")

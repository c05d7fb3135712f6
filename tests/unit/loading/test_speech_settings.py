"""A knob acts on a model of transformers, or is refused: of every knob it is said here which."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.families.settings import check_settings
from polymux.families.vits import FAMILIES
from polymux.knobs import groups_of

ACT = {
    "model": {"model", "revision", "cache_dir", "dtype", "diffusers_load_kwargs"},
    "device": {"device", "num_threads"},
    "scheduler": {"max_num_seqs", "max_queue"},
    "speech": {"vocoder", "voice_path"},
}
ALL_ACT = (
    "limits",
    "process",
    "replicas",
    "stages",
    "workers",
    "profiler",
    "log",
)  # limits of pictures have nothing to limit, and take nothing away
VALUES: dict[str, Any] = {
    "load_format": "dummy",
    "diffusers_call_kwargs": {"a": 1},
    "diffusion_attention_backend": "TORCH_SDPA",
    "diffusion_attention_config": {"default": {"backend": "TORCH_SDPA"}},
    "cache_backend": "first_block",
    "cache_config": {"threshold": 0.1},
    "gpu_memory_limit_gib": 1.0,
    "lora_path": ("x",),
    "dlo_runtime_cache_verify": "full",
    "dlo_use_allgather": False,
}
KNOBS = [
    (name, f)
    for name, group in groups_of(EngineConfig).items()
    for f in dataclasses.fields(group)
    if f.metadata and name not in ALL_ACT and f.name not in ACT.get(name, ())
]


def another(f: dataclasses.Field[Any]) -> Any:
    if f.name in VALUES:
        return VALUES[f.name]
    if isinstance(f.default, bool):
        return not f.default
    return f.default + 1 if isinstance(f.default, (int, float)) else True if f.name.endswith("allgather") else "x"


@pytest.mark.parametrize(("group", "f"), KNOBS, ids=lambda value: getattr(value, "name", value))
def test_what_cannot_act_is_refused(group: str, f: dataclasses.Field[Any]) -> None:
    config = EngineConfig.from_flat(model="m")
    changed = dict(vars(getattr(config, group))) | {f.name: another(f)}
    whole = object.__new__(type(getattr(config, group)))  # some knobs need others, which is checked when they are made
    for name, value in changed.items():
        object.__setattr__(whole, name, value)
    with pytest.raises(
        ConfigError, match=r"acts only on (pipelines of diffusers|models (that answer|whose answers go on together))"
    ) as caught:
        check_settings(dataclasses.replace(config, **{group: whole}), FAMILIES[0])
    assert caught.value.param == f.name


def test_what_acts_passes() -> None:
    check_settings(EngineConfig.from_flat(model="m", dtype="bf16", num_threads=1, max_num_seqs=2), FAMILIES[0])

"""Which models of transformers run on several ranks is known before any process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.orchestrator.plan import plan_of

TWO: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("BarkModel", TWO, "BarkModel runs on one rank"),
        ("GemmaForCausalLM", TWO, "GemmaForCausalLM runs on one rank"),
        ("Qwen3ForCausalLM", {"ulysses_degree": 2}, "--ulysses-degree acts only on pipelines"),
        ("Qwen3ForCausalLM", TWO | {"cfg_parallel_size": 2}, "--cfg-parallel-size acts only on pipelines"),
        ("Qwen3ForCausalLM", TWO | {"worker_backend": "ray"}, "--worker-backend exclude each other"),
        ("Qwen3ForCausalLM", TWO | {"decode_graphs": "compiled"}, "captured as they are"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str, flags: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ConfigError, match=message):
        plan_of(EngineConfig.from_flat(model=str(tmp_path), **flags))


def test_what_can_be_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    for flags in ({}, TWO, TWO | {"decode_graphs": "plain", "data_parallel_size": 2, "device": "cpu"}):
        assert len(plan_of(EngineConfig.from_flat(model=str(tmp_path), **flags))) == 1

"""What --profiler-config may say."""

from __future__ import annotations

from typing import Any

import pytest

from polymux.config import EngineConfig
from polymux.errors import ConfigError


def test_none_by_default() -> None:
    assert EngineConfig.from_flat(model="m").profiler.torch is None


def test_what_is_noted() -> None:
    given = {"profiler": "torch", "torch_profiler_dir": "traces", "torch_profiler_record_shapes": True}
    settings = EngineConfig.from_flat(model="m", profiler_config=given).profiler.torch
    assert settings is not None
    assert (settings.torch_profiler_record_shapes, settings.torch_profiler_with_stack) == (True, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profiler": "cuda", "torch_profiler_dir": "x"}, "Invalid enum value 'cuda'"),
        ({"profiler": "torch"}, "missing required field `torch_profiler_dir`"),
        ({"profiler": "torch", "torch_profiler_dir": "x", "delay": 3}, "unknown field `delay`"),
        ({"profiler": "torch", "torch_profiler_dir": 1}, "Expected `str`, got `int`"),
    ],
)
def test_what_it_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.from_flat(model="m", profiler_config=given)
    assert caught.value.param == "profiler_config"

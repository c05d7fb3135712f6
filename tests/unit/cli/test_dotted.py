"""Parts of a flag's JSON object as flags of their own."""

from __future__ import annotations

from typing import Any

import pytest

from polymux.cli.flags import Parser, add_config, given
from polymux.config import EngineConfig


def parsed(*words: str) -> dict[str, Any]:
    parser = Parser(prog="polymux")
    add_config(parser, EngineConfig)
    return given(parser.parse(words), EngineConfig)


def test_they_are_put_together() -> None:
    given = parsed(
        "--diffusion-attention-config.default.backend", "TORCH_SDPA", "--model", "m",
        "--diffusion-attention-config.default.block_sparse.sparsity=0.5",
        "--diffusion-attention-config.default.block_sparse.skip_layers", "[0, 1]",
        "--cache-config.mag_calibrate", "true", "--cache-backend", "mag_cache",
    )  # fmt: skip
    sparse = {"sparsity": 0.5, "skip_layers": [0, 1]}
    assert given == {
        "model": "m",
        "diffusion_attention_config": {"default": {"backend": "TORCH_SDPA", "block_sparse": sparse}},
        "cache_backend": "mag_cache",
        "cache_config": {"mag_calibrate": True},
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cache-config.threshold"], "argument --cache-config.threshold: expected one argument"),
        (["--cache-config.threshold", "--model", "m"], "expected one argument"),
        (["--cache-config.a", "1", "--cache-config.a", "2"], "argument --cache-config.a: given twice"),
        (["--cache-config.a", "1", "--cache-config.a.b", "2"], "argument --cache-config.a.b: a part of it has a value"),
        (["--cache-config..a", "1"], "a key is missing between its dots"),
        (["--cache-config.a", "1", "--cache-config", "{}"], "argument --cache-config: given twice"),
        (["--model.a", "1"], "unknown argument --model.a"),
    ],
)
def test_what_is_wrong(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*words)
    assert caught.value.code == 2 and said in capsys.readouterr().err

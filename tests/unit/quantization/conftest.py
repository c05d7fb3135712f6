"""Files as others make them: GGUF, and checkpoints that are quantized already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quantized_engines import write_gguf
from safetensors.torch import load_file

from polymux.config import ModelConfig
from polymux.loading import resolve
from polymux.memory import exchange


@pytest.fixture(scope="session")
def demo() -> Path:
    return resolve(ModelConfig(model="demo"))


@pytest.fixture(scope="session")
def demo_gguf(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`demo_gguf("Q8_0")`: the embedded model's transformer, the matrices of its blocks in this type."""
    state = load_file(demo / "transformer" / "diffusion_pytorch_model.safetensors")
    folder = tmp_path_factory.mktemp("gguf")

    def get(kind: str) -> Path:
        file = folder / f"{kind}.gguf"
        if not file.exists():
            write_gguf(file, state, kind)
        return file

    return get


@pytest.fixture
def swap_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny weights are weights too."""
    monkeypatch.setattr(exchange, "SMALL", 64)

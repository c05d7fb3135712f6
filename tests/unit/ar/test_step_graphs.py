"""Which graphs a device gets, and what becomes of a step that cannot be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymux.ar.step_graphs import StepGraphs
from polymux.decoding_config import DecodingConfig
from polymux.engine.ar_state import graphs_of
from polymux.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("how", "device", "graphs"),
    [
        ("auto", CPU, "off"),
        ("auto", GPU, "compiled"),
        ("plain", GPU, "plain"),
        ("compiled", GPU, "compiled"),
        ("off", GPU, "off"),
    ],
)
def test_how_a_step_runs(how: str, device: torch.device, graphs: str) -> None:
    assert graphs_of(DecodingConfig(decode_graphs=how), device) == graphs


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ConfigError, match="decode_graphs='plain': cpu is no GPU"):
        graphs_of(DecodingConfig(decode_graphs="plain"), CPU)


def test_what_cannot_be_captured_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache: Any = SimpleNamespace(
        device=CPU, rows=4, block_size=2, table=torch.zeros(5, 8, dtype=torch.int32), handle=0, batch=None
    )

    def network(tokens: torch.Tensor, positions: torch.Tensor, at: int, handle: int) -> torch.Tensor:
        return (tokens + positions)[:, None]

    def refuses(size: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    steps = StepGraphs(network, cache, torch.tensor([10, 20, 30, 40, 0]), "plain")  # type: ignore[arg-type]
    monkeypatch.setattr(steps, "_captures", True)  # as on a GPU
    monkeypatch.setattr(steps, "_capture", refuses)
    steps.prepare()
    assert "not captured, and run kernel by kernel: operation not permitted when stream is capturing" in caplog.text
    assert steps.run([1, 2, 3], [0, 1, 2], [2, 4, 6]).tolist() == [[11], [22], [33]]

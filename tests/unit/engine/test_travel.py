"""Tensors come out as they went in, whatever their type; and what is drawn next goes along."""

from __future__ import annotations

import pytest
import torch

from polymux.connector.memory import MemoryConnector
from polymux.diffusion.random_state import RandomState
from polymux.engine.travel import packed, random_now, split_random, unpacked

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 5, 7), (1, 200, 300)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Through a connector, in the message or beside it, and from memory that is not in order."""
    tensor = (torch.randn(shape) * 4).to(dtype)
    tensors = {"a": tensor, "b": tensor.transpose(0, -1) if shape else tensor}
    connector = MemoryConnector()
    got = unpacked(connector.get(connector.put("r", packed(tensors))), CPU)
    for name, sent in tensors.items():
        assert got[name].dtype is dtype and torch.equal(got[name], sent)
    connector.close()


def test_what_is_drawn_next() -> None:
    before = RandomState.now(CPU)
    torch.manual_seed(3)
    torch.randn(5)
    arrays = {"x": packed({"x": torch.ones(2)})["x"], **random_now(CPU)}
    expected = torch.randn(4)
    rest, random = split_random(arrays, CPU)
    assert list(rest) == ["x"] and random is not None
    random.apply()
    assert torch.equal(torch.randn(4), expected)
    before.apply()
    assert split_random(rest, CPU) == (rest, None)

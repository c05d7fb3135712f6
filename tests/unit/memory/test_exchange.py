"""Groups of components take turns in one piece of device memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polymux.memory import exchange
from polymux.memory.exchange import Exchange

from .toy import WIDTH, Toy, toy

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SMALL", 200)


@pytest.fixture
def modules() -> dict[str, Toy]:
    return {"text": toy(1, seed=1), "vision": toy(2, seed=2), "high": toy(3, seed=3), "low": toy(2, 2, seed=4)}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def swapped(modules: dict[str, Toy]) -> Iterator[Exchange]:
    groups = [{n: modules[n] for n in names} for names in (("text", "vision"), ("high",), ("low",))]
    made = Exchange(groups, CPU)
    yield made
    made.close()


def test_a_component_that_is_asked_for_computes_what_it_computed(modules: dict[str, Toy], x: torch.Tensor) -> None:
    wanted = {name: module(x) for name, module in modules.items()}
    groups = [{n: modules[n] for n in names} for names in (("text", "vision"), ("high",), ("low",))]
    swapped = Exchange(groups, CPU)
    for name in ("text", "vision", "high", "high", "low", "text", "low", "vision", "high"):
        swapped.before(name)
        torch.testing.assert_close(modules[name](x), wanted[name], rtol=1e-6, atol=1e-6)


def test_one_group_at_a_time(swapped: Exchange) -> None:
    def ready() -> list[str]:
        return [name for name in ("text", "vision", "high", "low") if swapped.ready(name)]

    assert ready() == []
    for name, expected in (
        ("vision", ["vision"]),
        ("text", ["text", "vision"]),
        ("high", ["high"]),
        ("low", ["low"]),
        ("text", ["text"]),
    ):
        swapped.before(name)
        assert ready() == expected


def test_what_is_there_is_not_moved_again(swapped: Exchange) -> None:
    swapped.before("high")
    moved = dict(swapped.moved)
    for _ in range(3):
        swapped.before("high")
    assert swapped.moved == moved and min(moved.values()) > 0


def test_memory_is_that_of_the_largest_group_and_never_grows(swapped: Exchange, modules: dict[str, Toy]) -> None:
    def big(name: str) -> int:
        return sum(p.nbytes for p in modules[name].parameters() if p.nbytes >= exchange.SMALL)

    need = max(big("text") + big("vision"), big("high"), big("low"))
    assert need <= swapped.nbytes <= need * 1.5  # each tensor begins at a multiple of 256 bytes
    memory = swapped._memory
    assert memory is not None
    for name in ("text", "low", "high", "vision") * 3:
        swapped.before(name)
        for parameter in modules[name].parameters():
            inside = 0 <= parameter.data_ptr() - memory.data_ptr() < memory.numel()
            assert inside == (parameter.nbytes >= exchange.SMALL)


def test_what_is_away_has_its_shape_and_type_and_no_value(swapped: Exchange, modules: dict[str, Toy]) -> None:
    swapped.before("high")
    away = modules["low"].first[1].up.weight
    assert away.shape == (13, WIDTH) and away.dtype == torch.float32 and away.device == CPU
    assert torch.isnan(away).all()
    assert torch.isfinite(modules["low"].first[1].scale) and torch.isfinite(modules["low"].first[1].shift).all()


def test_a_part_that_is_called_past_the_engine_is_brought_in(
    swapped: Exchange, modules: dict[str, Toy], x: torch.Tensor
) -> None:
    swapped.before("high")
    result = modules["low"].first[1](x)
    assert torch.isfinite(result).all() and swapped.ready("low") and not swapped.ready("high")
    assert not any(m._forward_pre_hooks for m in modules["low"].modules())  # and it runs unhooked from now on
    assert all(m._forward_pre_hooks for m in modules["high"].modules())


def test_free_and_allocate(swapped: Exchange, modules: dict[str, Toy], x: torch.Tensor) -> None:
    swapped.before("high")
    wanted = modules["high"](x)
    swapped.free()
    assert swapped.device_bytes == 0 and not swapped.ready("high")
    swapped.allocate()
    swapped.before("high")
    assert torch.equal(modules["high"](x), wanted)

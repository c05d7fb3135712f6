"""A plan carried out: components keep computing what they compute, through sleep as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymux.errors import ConfigError
from polymux.memory import exchange
from polymux.memory.kept import Kept
from polymux.memory.place import place
from polymux.memory.plan import GIB
from polymux.memory.residency import Residency, Tenant
from polymux.memory_config import MemoryConfig

from .toy import WIDTH, Toy, toy

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SMALL", 200)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def model() -> dict[str, Toy]:
    return {"text_encoder": toy(2, seed=1), "high": toy(5, seed=2), "low": toy(3, 2, seed=3), "vae": toy(1, seed=4)}


def tenants(modules: dict[str, Toy]) -> list[Tenant]:
    roles = {"text_encoder": "encoder", "vae": "decoder"}
    return [Tenant(name, roles.get(name, "denoiser"), module) for name, module in modules.items()]  # type: ignore[arg-type]


def run(weights: Residency, name: str, module: Toy, x: torch.Tensor) -> torch.Tensor:
    weights.before(name)
    try:
        result = module(x)
        assert isinstance(result, torch.Tensor)
        return result
    finally:
        weights.after(name)


SIZE = sum(p.nbytes for m in model().values() for p in m.parameters())

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("resident", {}),
    "model": ("model-level", {"enable_cpu_offload": True}),
    "layers": ("layerwise", {"enable_layerwise_offload": True, "dlo_prefetch_layers": 1}),
    "some-layers": (
        "layerwise",
        {"enable_layerwise_offload": True, "dlo_resident_layers": 2, "dlo_prefetch_layers": 0},
    ),
    "distributed": ("layerwise", {"enable_distributed_layerwise_offload": True}),
    "auto": ("resident", {"gpu_memory_limit_gib": "auto"}),
    "much": ("resident", {"gpu_memory_limit_gib": 1}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy(strategy: str, x: torch.Tensor) -> None:
    kind, flags = STRATEGIES[strategy]
    modules = model()
    wanted = {name: module(x) for name, module in modules.items()}
    weights = place(tenants(modules), MemoryConfig(**flags), CPU)
    assert weights.plan.strategy == kind
    for _ in range(2):
        for name in ("text_encoder", "high", "high", "low", "vae", "high", "text_encoder", "vae"):
            torch.testing.assert_close(run(weights, name, modules[name], x), wanted[name], rtol=1e-6, atol=1e-6)
            assert weights.ready(name)
        weights.sleep()
        weights.wake()
    weights.close()


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_under_a_limit(share: float, x: torch.Tensor) -> None:
    modules = model()
    wanted = {name: module(x) for name, module in modules.items()}
    limit = SIZE * 2 * share / 0.85 / GIB  # images have a page per block at least, twice as much as these need
    weights = place(tenants(modules), MemoryConfig(gpu_memory_limit_gib=limit, dlo_prefetch_layers=0), CPU)
    assert weights.plan.device_bytes <= SIZE * 2 * share
    for name in ("text_encoder", "high", "low", "high", "vae"):
        torch.testing.assert_close(run(weights, name, modules[name], x), wanted[name], rtol=1e-6, atol=1e-6)


def test_layers_that_are_not_ready_make_way_for_each_other(x: torch.Tensor) -> None:
    modules = model()
    weights = place(tenants(modules), MemoryConfig(enable_layerwise_offload=True), CPU)
    run(weights, "high", modules["high"], x)
    assert weights.ready("high") and not weights.ready("low") and weights.ready("vae")
    run(weights, "low", modules["low"], x)
    assert weights.ready("low") and not weights.ready("high")


def test_the_decision_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        place(tenants(model()), MemoryConfig(enable_layerwise_offload=True, dlo_resident_layers=1), CPU)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weights:")]
    for words in ("layerwise (--enable-layerwise-offload", "high: 4 of 5 blocks streamed", "private pinned memory"):
        assert words in line


def test_what_is_more_than_its_bytes_is_refused_by_name() -> None:
    class Packed(torch.Tensor):
        """As quantized layers have them."""

    modules = model()
    weight = modules["high"].first[1].up.weight.as_subclass(Packed)
    modules["high"].first[1].up.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ConfigError, match=r"first\.1\.up\.weight"):
        place(tenants(modules), MemoryConfig(enable_layerwise_offload=True), CPU)
    place(tenants(modules), MemoryConfig(), CPU)  # where nothing is to move it does not matter


def test_weights_that_stay_can_be_parked(x: torch.Tensor) -> None:
    module = toy(3)
    wanted = module(x)
    kept = Kept(module, CPU)
    for _ in range(2):
        kept.park()
        assert torch.isnan(module.enter.weight).all()
        kept.park()  # it is already
        kept.unpark()
        torch.testing.assert_close(module(x), wanted, rtol=1e-6, atol=1e-6)
        kept.unpark()


def test_offloading_that_saves_nothing_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    place(tenants(model()), MemoryConfig(), CPU)
    assert not caplog.records
    place(tenants(model()), MemoryConfig(enable_cpu_offload=True), CPU)
    assert "the device is the CPU" in caplog.text


def test_components_that_share_weights_are_refused() -> None:
    modules = model()
    modules["low"].leave.weight = modules["high"].leave.weight
    with pytest.raises(ConfigError, match=r"high and low share leave\.weight"):
        place(tenants(modules), MemoryConfig(enable_cpu_offload=True), CPU)
    place(tenants(modules), MemoryConfig(), CPU)

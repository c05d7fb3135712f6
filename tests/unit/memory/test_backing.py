"""Streaming complete blocks out of the runtime cache or a mapped checkpoint gives what the module gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymux.errors import CacheError
from polymux.memory.backing import HostBacking, cached_blocks, is_file_mapped, staged_entry
from polymux.memory.base import HostBlocks
from polymux.memory.block_stream import BlockStream
from polymux.memory.byte_source import TensorBytes
from polymux.memory.layout import layout_of
from polymux.memory.residency import Tenant
from polymux.memory.runtime_cache import CacheSettings, Content, Identity, RuntimeCache
from polymux.memory.runtime_cache.mapped import Mapping
from polymux.memory.runtime_cache.packing import file_layout, reader
from polymux.memory.slots import Slots
from polymux.memory.staging import StagedBlocks, StagingSettings

CPU = torch.device("cpu")
PATHS = ("0", "1", "2", "3", "4")
SMALL_PIECES = StagingSettings(piece_bytes=4096, threads=2, spare_pieces=2)


def model() -> torch.nn.Module:
    """Blocks that do not commute, of different sizes inside."""
    torch.manual_seed(1)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(32, 40 + 9 * i), torch.nn.Tanh(), torch.nn.Linear(40 + 9 * i, 32))
        for i in range(len(PATHS))
    ]
    return torch.nn.Sequential(*blocks).eval().requires_grad_(False)


@pytest.fixture
def cache(tmp_path: Path) -> RuntimeCache:
    return RuntimeCache(CacheSettings(root=tmp_path / "cache", threads=1))


@pytest.fixture
def mapping(cache: RuntimeCache) -> Mapping:
    identity = Identity(model_class="m", sources=(), libraries=(), blocks=PATHS, dtype="float32")
    module = model()
    with cache.turn(identity) as turn:
        turn.publish(Content(identity, "m", file_layout(layout_of(module, PATHS)), reader(module)))
        assert turn.entry is not None
        return Mapping(turn.entry)


def in_use(cache: RuntimeCache) -> bool:
    return cache.store.entries()[0].in_use


def check(source: HostBlocks, module: torch.nn.Module) -> None:
    """Streamed through two slots, with one resident block, for some passes."""
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    wanted = model()(x)
    slots = Slots(2, source.slot_bytes, CPU)
    slots.allocate()
    stream = BlockStream(module, source, slots, resident=(2,))
    for _ in range(3):
        stream.begin()
        torch.testing.assert_close(module(x), wanted, rtol=1e-6, atol=1e-6)
        stream.end()
    assert stream.missed == 0
    stream.close()


def test_from_the_mapping(mapping: Mapping, cache: RuntimeCache) -> None:
    source = cached_blocks(mapping, CPU, pin_limit=0)
    del mapping
    check(source, model())
    assert not in_use(cache)


def test_staged_from_the_entrys_file(mapping: Mapping, cache: RuntimeCache) -> None:
    source = staged_entry(mapping, CPU, SMALL_PIECES)
    mapping.close()
    del mapping
    digest = cache.store.digests()[0]
    with pytest.raises(CacheError, match="in use"):
        cache.store.remove(digest)
    assert digest in source.description
    check(source, model())
    assert not in_use(cache)


def test_staged_from_the_modules_own_tensors() -> None:
    module = model()
    check(StagedBlocks(TensorBytes(module, layout_of(module, PATHS), "tensors"), CPU, SMALL_PIECES), module)


def test_backing_takes_a_mapping_over_once(mapping: Mapping) -> None:
    module = model()
    backing = HostBacking({"transformer": mapping}, 0)
    source, resident = backing(Tenant("transformer", "denoiser", module), PATHS, (2,), CPU)
    assert "runtime cache" in source.description
    assert list(resident) == [2]
    source.close()
    source, resident = backing(Tenant("transformer", "denoiser", module), PATHS, (2,), CPU)
    assert "private" in source.description
    source.close()


def load(file: Path) -> torch.nn.Module:
    module = model()
    module.load_state_dict(load_file(file), assign=True)
    return module


def halved(file: Path) -> torch.nn.Module:
    return load(file).to(torch.float16)


def one_copied(file: Path) -> torch.nn.Module:
    module = load(file)
    module[3][2].bias.data = module[3][2].bias.data.clone()
    return module


@pytest.mark.parametrize(("make", "mapped"), [(load, True), (halved, False), (one_copied, False)])
def test_only_tensors_that_are_as_they_are_on_file_count_as_mapped(
    tmp_path: Path, make: Callable[[Path], torch.nn.Module], mapped: bool
) -> None:
    save_file(model().state_dict(), tmp_path / "m.safetensors")
    module = make(tmp_path / "m.safetensors")
    assert is_file_mapped(module, layout_of(module, PATHS)) is mapped

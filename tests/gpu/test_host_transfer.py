"""Host memory and a real GPU: registering a read-only mapping, what is left when that fails, and staging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polymux.memory.backing import staged_entry
from polymux.memory.layout import layout_of, pack
from polymux.memory.runtime_cache import CacheSettings, Content, Entry, Identity, RuntimeCache
from polymux.memory.runtime_cache.mapped import CudaRegistrar, MappedBlocks, Mapping
from polymux.memory.runtime_cache.packing import file_layout, reader
from polymux.memory.staging import StagingSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PATHS = ("0", "1", "2", "3")
NO_LIMIT = 2**60


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(2048, 2000 + 100 * i) for i in range(4))).requires_grad_(False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    identity = Identity(model_class="m", sources=(), libraries=(), blocks=PATHS, dtype="float32")
    cache, module = RuntimeCache(CacheSettings(root=tmp_path / "cache")), model()
    with cache.turn(identity) as turn:
        turn.publish(Content(identity, "m", file_layout(layout_of(module, PATHS)), reader(module)))
    entry = cache.open_or_none(identity)
    assert entry is not None
    return entry


def expected(device: torch.device) -> list[torch.Tensor]:
    module = model()
    images = [torch.zeros(i.nbytes, dtype=torch.uint8) for i in layout_of(module, PATHS).blocks]
    for image, memory in zip(layout_of(module, PATHS).blocks, images, strict=True):
        pack(module, image, memory)
    return [image.to(device) for image in images]


def test_a_registered_mapping_is_pinned_and_its_bytes_arrive(entry: Entry, device: torch.device) -> None:
    mapping = Mapping(entry)
    assert mapping.register(CudaRegistrar(device), NO_LIMIT)
    assert mapping.memory.is_pinned()
    blocks = MappedBlocks(mapping, device)
    slot = torch.empty(blocks.slot_bytes, dtype=torch.uint8, device=device)
    for index, wanted in enumerate(expected(device)):
        blocks.fetch(index, slot, torch.cuda.current_stream().record_event()).wait()
        assert torch.equal(slot[: wanted.numel()], wanted)
    blocks.close()


def test_memory_can_be_registered_again_after_it_was_closed(entry: Entry, device: torch.device) -> None:
    for _ in range(2):
        mapping = Mapping(entry)
        assert mapping.register(CudaRegistrar(device), NO_LIMIT)
        mapping.close()


def test_a_registration_that_fails_leaves_the_device_usable(entry: Entry, device: torch.device) -> None:
    mapping = Mapping(entry)
    registrar = CudaRegistrar(device)
    assert registrar.register(mapping.memory) == 0
    assert not mapping.register(registrar, NO_LIMIT), "it is registered already"
    assert torch.ones(3, device=device).sum().item() == 3
    assert registrar.unregister(mapping.memory) == 0
    mapping.close()


def test_staged_blocks_arrive_in_any_order(entry: Entry, device: torch.device) -> None:
    blocks = staged_entry(Mapping(entry), device, StagingSettings(piece_bytes=2**20, threads=3, spare_pieces=2))
    slots = [torch.empty(blocks.slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    wanted = expected(device)
    blocks.expect(range(4))
    order = [0, 1, 2, 3, 0, 1, 3, 3, 0, 2, 1, 0, 1, 2, 3] * 3
    results = []
    for n, index in enumerate(order):
        slot = slots[n % 2]
        blocks.fetch(index, slot, torch.cuda.current_stream().record_event()).wait()
        results.append(torch.equal(slot[: wanted[index].numel()], wanted[index]))
    assert all(results)
    blocks.close()

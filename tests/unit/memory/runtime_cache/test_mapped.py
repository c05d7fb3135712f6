"""A mapping is registered whole or not at all, and never unmapped while a device may read it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cache_models import model, model_layout, published

from polymux.errors import CacheError, PinnedMemoryError
from polymux.memory.layout import pack
from polymux.memory.runtime_cache.entry import Entry
from polymux.memory.runtime_cache.mapped import MappedBlocks, Mapping
from polymux.memory.runtime_cache.store import Store

NO_LIMIT = 2**60


class Driver:
    """Stands in for CUDA's: does what it is told, and writes down what is asked of it."""

    def __init__(self, register: int = 0, unregister: int = 0, pinned: bool = True) -> None:
        self.answers = {"register": register, "unregister": unregister}
        self.pinned = pinned
        self.asked: list[str] = []

    def _answer(self, name: str, memory: torch.Tensor) -> int:
        assert memory.sum() != 0, "it is still mapped"
        assert memory.data_ptr() % 4096 == memory.nbytes % 4096 == 0
        self.asked.append(name)
        return self.answers[name]

    def register(self, memory: torch.Tensor) -> int:
        return self._answer("register", memory)

    def unregister(self, memory: torch.Tensor) -> int:
        return self._answer("unregister", memory)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return self.pinned

    def synchronize(self) -> None:
        self.asked.append("synchronize")


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    entry = published(tmp_path / "cache", model())
    yield entry
    entry.close()


@pytest.fixture
def store(entry: Entry) -> Store:
    return Store(entry.path.parent)


def in_use(store: Store) -> bool:
    return store.entries()[0].in_use


def test_a_mapping_is_registered_and_shut_down_in_order(entry: Entry, store: Store) -> None:
    mapping, driver = Mapping(entry), Driver()
    entry.close()
    assert mapping.register(driver, NO_LIMIT)
    assert mapping.registered
    mapping.close()
    assert driver.asked == ["register", "synchronize", "unregister"]
    assert not in_use(store)


def test_a_cold_file_is_read_in_before_it_is_registered(entry: Entry) -> None:
    fd, size = entry.file.fileno(), entry.layout.file_size
    os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)

    class Looking(Driver):
        def register(self, memory: torch.Tensor) -> int:
            for at in range(0, size, 4096):
                os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)  # raises unless the page is in memory
            return super().register(memory)

    mapping = Mapping(entry)
    assert mapping.register(Looking(), NO_LIMIT)
    mapping.close()


def test_what_is_over_the_budget_is_not_registered_at_all(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    mapping, driver = Mapping(entry), Driver()
    assert not mapping.register(driver, entry.layout.file_size - 1)
    assert driver.asked == []
    assert "--dlo-runtime-cache-pin-limit-gib" in caplog.text
    assert mapping.register(driver, entry.layout.file_size)
    mapping.close()


def test_a_driver_that_refuses_leaves_a_usable_mapping(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    mapping, driver = Mapping(entry), Driver(register=1)
    assert not mapping.register(driver, NO_LIMIT)
    assert "CUDA error 1" in caplog.text
    mapping.close()
    assert driver.asked == ["register"]


def test_memory_that_is_not_pinned_after_all_is_rolled_back(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    mapping, driver = Mapping(entry), Driver(pinned=False)
    assert not mapping.register(driver, NO_LIMIT)
    assert not mapping.registered
    assert driver.asked == ["register", "unregister"]
    assert "does not take it as such" in caplog.text
    mapping.close()
    assert driver.asked == ["register", "unregister"]


def test_if_the_rollback_fails_the_memory_is_never_unmapped(entry: Entry, store: Store) -> None:
    mapping = Mapping(entry)
    entry.close()
    with pytest.raises(PinnedMemoryError, match="cannot be unregistered: CUDA error 4"):
        mapping.register(Driver(unregister=4, pinned=False), NO_LIMIT)
    del mapping
    gc.collect()
    assert in_use(store), "the pages are still there"


def test_if_unregistering_at_the_end_fails_the_memory_is_never_unmapped(entry: Entry, store: Store) -> None:
    mapping = Mapping(entry)
    entry.close()
    assert mapping.register(Driver(unregister=4), NO_LIMIT)
    with pytest.raises(PinnedMemoryError):
        mapping.close()
    del mapping
    gc.collect()
    assert in_use(store)


def test_the_entry_stays_in_use_as_long_as_a_tensor_looks_at_it(entry: Entry, store: Store) -> None:
    mapping = Mapping(entry)
    image = mapping.image(1)
    entry.close()
    mapping.close()
    del mapping
    with pytest.raises(CacheError, match="in use"):
        store.remove(entry.path.name)
    assert image.any()
    del image
    gc.collect()
    store.remove(entry.path.name)


def test_blocks_arrive_from_the_mapping(entry: Entry) -> None:
    blocks = MappedBlocks(Mapping(entry), torch.device("cpu"))
    module = model()
    layout = model_layout(module)
    assert blocks.layout == layout
    for i in (0, 2, 1, 1):
        wanted = torch.zeros(layout.blocks[i].nbytes, dtype=torch.uint8)
        pack(module, layout.blocks[i], wanted)
        slot = torch.full((blocks.slot_bytes,), 7, dtype=torch.uint8)
        blocks.fetch(i, slot, None).wait()
        assert torch.equal(slot[: wanted.numel()], wanted)
    assert "mapped" in blocks.description
    blocks.close()

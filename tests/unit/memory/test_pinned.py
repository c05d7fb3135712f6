"""Pinned memory is unpinned before it is unmapped, whoever forgets to close it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from polymux.errors import ConfigError, PinnedMemoryError
from polymux.memory.pinned import PinnedBuffer


def is_mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


class FakeDriver:
    """Stands in for the CUDA runtime."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        del self.registered[address]
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("polymux.memory.pinned.forget_error", lambda: None)
    return fake


def test_close_unpins_and_views_stay_readable(driver: FakeDriver) -> None:
    buffer = PinnedBuffer(5000)
    buffer.tensor.fill_(7)
    view = buffer.tensor[10:20]
    buffer.pin()
    assert list(driver.registered.values()) == [5000]
    buffer.close()
    buffer.close()
    assert not driver.registered
    assert view.tolist() == [7] * 10


def test_a_forgotten_buffer_is_unpinned_while_it_is_still_mapped(driver: FakeDriver) -> None:
    buffer = PinnedBuffer(1 << 20)
    buffer.pin()
    address, view = buffer.tensor.data_ptr(), buffer.tensor[:8]
    del buffer
    gc.collect()
    assert address in driver.registered, "a tensor still looks at it"
    del view
    gc.collect()
    assert not driver.registered


def test_refusals_are_errors(driver: FakeDriver) -> None:
    buffer = PinnedBuffer(4096)
    driver.status = 2
    with pytest.raises(ConfigError, match="CUDA error 2"):
        buffer.pin()
    driver.status = 0
    buffer.pin()
    driver.status = 713
    with pytest.raises(PinnedMemoryError, match="713"):
        buffer.close()


def test_an_empty_buffer_can_be_pinned(driver: FakeDriver) -> None:
    """The image of a component whose parameters are all too small to move."""
    buffer = PinnedBuffer(0)
    buffer.pin()
    assert all(driver.registered) and driver.registered
    buffer.close()
    assert not driver.registered

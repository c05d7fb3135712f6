"""Whatever is fetched in whatever order, the slot gets the block's bytes; and threads end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polymux.errors import CacheError
from polymux.memory.base import Layout
from polymux.memory.byte_source import ByteSource, FileBytes, TensorBytes
from polymux.memory.layout import layout_of, pack
from polymux.memory.read_ahead import Buffer, ReadAhead
from polymux.memory.staging import StagedBlocks, StagingSettings

CPU = torch.device("cpu")


def model() -> torch.nn.Module:
    """Blocks of different sizes, one of them empty, one whose memory is not in the order of its dimensions."""
    torch.manual_seed(1)
    convolution = torch.nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
    norm = torch.nn.BatchNorm1d(11)
    blocks = [
        torch.nn.Linear(60, 61),
        torch.nn.Identity(),
        convolution,
        torch.nn.Linear(3, 3, dtype=torch.bfloat16),
        norm,
    ]
    return torch.nn.Sequential(*blocks).requires_grad_(False)


def images(module: torch.nn.Module) -> tuple[Layout, list[torch.Tensor]]:
    layout = layout_of(module, [str(i) for i in range(5)])
    packed = [torch.zeros(image.nbytes, dtype=torch.uint8) for image in layout.blocks]
    for image, memory in zip(layout.blocks, packed, strict=True):
        pack(module, image, memory)
    return layout, packed


@pytest.fixture(params=["file", "tensors"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ByteSource:
    module = model()
    layout, packed = images(module)
    if request.param == "tensors":
        return TensorBytes(module, layout, "a module")
    file = tmp_path / "blocks"
    file.write_bytes(b"head" + b"".join(bytes(p.numpy()) for p in packed))
    offsets = [4 + sum(p.numel() for p in packed[:i]) for i in range(len(packed))]
    with file.open("rb") as stream:
        return FileBytes(layout, file.name, stream.fileno(), offsets)


@pytest.fixture(params=[(97, 1, 0), (1000, 3, 1), (1 << 20, 2, 4)], ids=["crumbs", "pieces", "whole blocks"])
def staged(source: ByteSource, request: pytest.FixtureRequest) -> Iterator[StagedBlocks]:
    piece, threads, spare = request.param
    blocks = StagedBlocks(source, CPU, StagingSettings(piece_bytes=piece, threads=threads, spare_pieces=spare))
    yield blocks
    blocks.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(("polymux-stage", "polymux-send"))]


def assert_tensors(layout: Layout, index: int, slot: torch.Tensor) -> None:
    """The slot holds the block's tensors; what is between them does not matter."""
    _, packed = images(model())
    for place in layout.blocks[index].places:
        assert torch.equal(place.view(slot), place.view(packed[index])), place.names


def check(blocks: StagedBlocks, indices: list[int]) -> None:
    """Fetch two ahead, as the ring does."""
    slots = [torch.full((blocks.slot_bytes,), 7, dtype=torch.uint8) for _ in range(3)]
    arrivals = {}
    for n, index in enumerate(indices):
        arrivals[n] = blocks.fetch(index, slots[n % 3], None)
        if n >= 2:
            arrivals[n - 2].wait()
            assert_tensors(blocks.layout, indices[n - 2], slots[(n - 2) % 3])
    for n in range(max(0, len(indices) - 2), len(indices)):
        arrivals[n].wait()
        assert_tensors(blocks.layout, indices[n], slots[n % 3])


def test_rounds_as_expected(staged: StagedBlocks) -> None:
    staged.expect(range(5))
    check(staged, [*range(5)] * 3)


def test_a_round_of_some_blocks(staged: StagedBlocks) -> None:
    staged.expect([3, 0, 4])
    check(staged, [3, 0, 4] * 3)


def test_nothing_was_expected(staged: StagedBlocks) -> None:
    check(staged, [0, 1, 2, 3, 4, 0])


def test_fetches_in_any_order_are_answered(staged: StagedBlocks) -> None:
    staged.expect([0, 1, 2, 3])
    check(staged, random.Random(1).choices(range(5), k=30))


def test_what_is_expected_may_change(staged: StagedBlocks) -> None:
    staged.expect(range(5))
    check(staged, [0, 1])
    staged.expect([4, 3])
    check(staged, [4, 3, 4])
    staged.expect([1])  # a block without bytes
    check(staged, [1, 1, 0])


def test_closing_in_the_middle_of_a_round_ends_the_threads(staged: StagedBlocks) -> None:
    staged.expect(range(5))
    staged.fetch(0, torch.empty(staged.slot_bytes, dtype=torch.uint8), None)


def test_the_description_says_where_from_and_how(staged: StagedBlocks) -> None:
    assert "staged by" in staged.description


def test_a_file_that_is_cut_off_while_in_use_is_an_error_and_no_block(tmp_path: Path) -> None:
    layout, packed = images(model())
    file = tmp_path / "blocks"
    file.write_bytes(bytes(packed[0].numpy()))
    with file.open("r+b") as stream:
        source = FileBytes(layout, "blocks", stream.fileno(), [0] * 5)
        blocks = StagedBlocks(source, CPU, StagingSettings(piece_bytes=1000, threads=2))
        slot = torch.empty(blocks.slot_bytes, dtype=torch.uint8)
        stream.truncate(3000)
        with pytest.raises(CacheError, match="ends early, at 3000 bytes"):
            blocks.fetch(0, slot, None).wait()
        stream.seek(0)
        stream.write(bytes(packed[0].numpy()))
        stream.flush()
        blocks.fetch(0, slot, None).wait()
        assert_tensors(layout, 0, slot)
        blocks.close()


def test_an_error_of_any_kind_reaches_whoever_waits() -> None:
    class Broken(TensorBytes):
        def read(self, index: int, offset: int, out: torch.Tensor) -> None:
            raise KeyError(index)

    module = model()
    blocks = StagedBlocks(Broken(module, images(module)[0], "nothing"), CPU, StagingSettings(threads=1))
    with pytest.raises(KeyError):
        blocks.fetch(0, torch.empty(blocks.slot_bytes, dtype=torch.uint8), None).wait()
    blocks.close()
    blocks = StagedBlocks(TensorBytes(module, images(module)[0], "tensors"), CPU, StagingSettings(threads=1))
    with pytest.raises(RuntimeError, match="size"):
        blocks.fetch(0, torch.empty(3, dtype=torch.uint8), None).wait()
    slot = torch.empty(blocks.slot_bytes, dtype=torch.uint8)
    blocks.fetch(0, slot, None).wait()
    assert_tensors(blocks.layout, 0, slot)
    blocks.close()


def test_only_host_memory_can_be_staged() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="meta"):
        TensorBytes(torch.nn.Sequential(module), layout_of(torch.nn.Sequential(module), ["0"]), "nothing")


class Transfer:
    """Stands in for an event of the device: what was sent has not left before somebody waits for it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.before, self.left = memory, memory.clone(), False

    def query(self) -> bool:
        return self.left

    def synchronize(self) -> None:
        assert torch.equal(self.memory, self.before), "it was filled again while the device still read it"
        self.left = True


def test_a_buffer_is_filled_again_once_it_has_left(source: ByteSource) -> None:
    _, packed = images(model())
    buffers = [Buffer(torch.zeros(1000, dtype=torch.uint8)) for _ in range(3)]
    with ReadAhead(source, buffers, threads=2) as reader:
        reader.expect(range(5))
        for index in (0, 2, 3, 4, 0, 3, 2, 4, 1, 0):
            pieces = []
            for piece in reader.pieces(index):
                pieces.append(piece.memory.clone())
                transfer = Transfer(piece.memory)
                piece.buffer.sent = transfer  # type: ignore[assignment]
            if pieces and isinstance(source, FileBytes):
                assert torch.equal(torch.cat(pieces), packed[index])

"""A streamed module computes what it computed, in whatever order its blocks run, and nothing is fetched in vain."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from polymux.memory.block_stream import BlockStream
from polymux.memory.containers import block_paths
from polymux.memory.layout import layout_of
from polymux.memory.slots import Slots, ring, successors

from .toy import WIDTH, LateBlocks, Toy, toy

CPU = torch.device("cpu")


def streamed(
    module: Toy, slots: int | Slots, resident: Collection[int] = (), paths: list[str] | None = None
) -> tuple[BlockStream, LateBlocks]:
    layout = layout_of(module, paths or block_paths(module))
    source = LateBlocks(module, layout, CPU)
    if isinstance(slots, int):
        slots = Slots(slots, source.slot_bytes, CPU)
        slots.allocate()
    return BlockStream(module, source, slots, resident), source


def run(stream: BlockStream, module: Toy, x: torch.Tensor) -> torch.Tensor:
    stream.begin()
    try:
        result = module(x)
        assert isinstance(result, torch.Tensor)
        return result
    finally:
        stream.end()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize(("first", "second"), [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (2, 1), (3, 4), (4, 4), (5, 5)])
def test_the_output_is_the_same_and_every_block_is_asked_for_in_time(
    first: int, second: int, slots: int, x: torch.Tensor
) -> None:
    module = toy(first, second)
    wanted = module(x)
    stream, _ = streamed(module, slots)
    for _ in range(3):
        torch.testing.assert_close(run(stream, module, x), wanted, rtol=1e-6, atol=1e-6)
    assert stream.missed == 0
    blocks = first + second
    places = ring(blocks, slots)
    alone = [place for place in set(places) if places.count(place) == 1]  # such a block stays in its slot
    shared = blocks - len(alone)
    ahead = min(blocks, slots) - len(alone)  # the begin of the next pass is on its way already
    assert stream.fetched == len(alone) + 3 * shared + ahead


@pytest.mark.parametrize("resident", [{0}, {1, 3}, {0, 1, 2, 3, 4}, {4}])
def test_resident_blocks_are_fetched_once(resident: set[int], x: torch.Tensor) -> None:
    module = toy(3, 2)
    wanted = module(x)
    stream, source = streamed(module, 1, resident)
    for _ in range(2):
        torch.testing.assert_close(run(stream, module, x), wanted, rtol=1e-6, atol=1e-6)
    assert not set(source.fetches) & resident
    assert stream.device_bytes == sum(source.layout.blocks[i].nbytes for i in resident)


def test_views_stay_where_they_are(x: torch.Tensor) -> None:
    module = toy(5)
    stream, _ = streamed(module, 2)
    before = [(id(p), p.data_ptr()) for p in module.parameters()]
    run(stream, module, x)
    assert [(id(p), p.data_ptr()) for p in module.parameters()] == before


def test_tied_tensors_stay_tied_and_memory_formats_survive(x: torch.Tensor) -> None:
    module = toy(3)
    streamed(module, 2)
    assert module.first[0].shared is module.leave.weight
    assert module.first[1].again is module.first[1].up
    assert module.first[2].conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_another_order_is_right_at_once_and_in_time_from_the_second_pass_on(x: torch.Tensor) -> None:
    module = toy(4, 3)
    module.order = [module.second[0], *module.first, module.second[2], module.second[1]]
    wanted = module(x)
    stream, _ = streamed(module, 2)
    torch.testing.assert_close(run(stream, module, x), wanted, rtol=1e-6, atol=1e-6)
    missed = stream.missed
    assert missed > 0
    for _ in range(2):
        torch.testing.assert_close(run(stream, module, x), wanted, rtol=1e-6, atol=1e-6)
    assert stream.missed == missed


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_blocks_that_are_left_out_or_run_twice(slots: int, x: torch.Tensor) -> None:
    module = toy(6)
    usual = list(module.order)
    orders = [usual, usual[:3] + usual[4:], [*usual, usual[2]], usual[::-1], usual[2:3] * 3, usual]
    wanted = []
    for module.order in orders:
        wanted.append(module(x))
    stream, _ = streamed(module, slots)
    for module.order, result in zip(orders, wanted, strict=True):
        torch.testing.assert_close(run(stream, module, x), result, rtol=1e-6, atol=1e-6)


def test_a_pass_that_fails_in_the_middle_leaves_the_next_one_right(x: torch.Tensor) -> None:
    module = toy(5)
    wanted = module(x)
    stream, _ = streamed(module, 2)

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    handle = module.first[2].down.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(stream, module, x)
    handle.remove()
    for _ in range(2):
        torch.testing.assert_close(run(stream, module, x), wanted, rtol=1e-6, atol=1e-6)
    assert stream.missed == 0


def test_two_modules_share_the_slots(x: torch.Tensor) -> None:
    one, other = toy(5, seed=1), toy(2, 2, seed=2)
    wanted = one(x), other(x)
    largest = max(layout_of(m, block_paths(m)).largest for m in (one, other))
    slots = Slots(2, largest, CPU)
    slots.allocate()
    first, second = streamed(one, slots)[0], streamed(other, slots)[0]
    for turn in (0, 0, 1, 0, 1, 1):
        stream, module = ((first, one), (second, other))[turn]
        torch.testing.assert_close(run(stream, module, x), wanted[turn], rtol=1e-6, atol=1e-6)
        assert stream.ready and not (second, first)[turn].ready


def test_a_submodule_that_is_called_outside_of_a_pass_finds_its_weights(x: torch.Tensor) -> None:
    module = toy(4)
    wanted = module.first[3](x)
    streamed(module, 2)
    torch.testing.assert_close(module.first[3](x), wanted, rtol=1e-6, atol=1e-6)


def test_let_go_and_bind_again(x: torch.Tensor) -> None:
    module = toy(4)
    wanted = module(x)
    slots = Slots(2, layout_of(module, block_paths(module)).largest, CPU)
    slots.allocate()
    stream, _ = streamed(module, slots, {1})
    run(stream, module, x)
    stream.let_go()
    slots.free()
    assert stream.device_bytes == 0
    assert torch.isnan(module.first[0].up.weight).all() and torch.isnan(module.first[1].shift).all()
    slots.allocate()
    stream.bind()
    torch.testing.assert_close(run(stream, module, x), wanted, rtol=1e-6, atol=1e-6)


def test_after_close_nothing_is_hooked() -> None:
    module = toy(3)
    stream, _ = streamed(module, 2)
    stream.close()
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in module.first)


@pytest.mark.parametrize("blocks", range(1, 12))
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_neighbours_round_the_ring_have_different_slots(blocks: int, slots: int) -> None:
    places = ring(blocks, slots)
    assert sorted(successors(places)) == list(range(blocks))
    assert places[: min(blocks, slots)] == list(range(min(blocks, slots)))
    for p in range(blocks):
        same = places[p] == places[(p + 1) % blocks]
        assert same == (blocks == 1 or slots == 1 or (slots == 2 and blocks % 2 == 1 and p == blocks - 1))

"""One of two ranks that gather blocks from each other; prints a line of JSON per scenario.

python -m memory.gather_worker RANK STORE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from polymux.errors import GenerationError
from polymux.memory.block_stream import GatheredStream
from polymux.memory.containers import block_paths
from polymux.memory.gather_blocks import GatherBlocks
from polymux.memory.layout import layout_of
from polymux.memory.slots import Slots

from .toy import WIDTH, toy

DEVICE = torch.device("cpu" if sys.argv[-1] != "cuda" else f"cuda:{sys.argv[1]}")


class Rank:
    """A rank with a module whose blocks are gathered, and one with the weights in place."""

    def __init__(self, rank: int, slots: Slots | None = None, seed: int = 0, resident: tuple[int, ...] = ()) -> None:
        self.rank = rank
        self.plain, self.module = toy(3, 2, seed).to(DEVICE), toy(3, 2, seed).to(DEVICE)
        layout = layout_of(self.module, block_paths(self.module))
        self.source = GatherBlocks(self.module, layout, DEVICE, dist.group.WORLD)
        if slots is None:
            slots = Slots(2, self.source.slot_bytes, DEVICE)
            slots.allocate()
        self.stream = GatheredStream(self.module, self.source, slots, resident)

    def check(self) -> None:
        """A pass with an input of this rank's own."""
        x = torch.randn(2, WIDTH).to(DEVICE)
        self.stream.begin()
        try:
            torch.testing.assert_close(self.module(x), self.plain(x), rtol=1e-6, atol=1e-6)
        finally:
            self.stream.end()


def both_compute(rank: int) -> None:
    one = Rank(rank)
    for _ in range(3):
        one.check()
    assert one.stream.missed == 0


def one_computes_and_one_idles(rank: int) -> None:
    one = Rank(rank)
    for busy in (0, 0, 1, 0):
        one.check() if busy == rank else one.stream.idle_pass()
    one.check()


def each_keeps_its_part(rank: int) -> None:
    one = Rank(rank)
    total = sum(image.nbytes for image in one.source.layout.blocks)
    assert total / 2 <= one.source._buffer.nbytes <= total / 2 + 8192, (total, one.source._buffer.nbytes)


def a_pass_fails_on_one_rank(rank: int) -> None:
    one = Rank(rank)
    for stage in ("first.0", "first.2", "second.1", "leave", "enter"):

        def fail(*_: object) -> None:
            raise RuntimeError("in the middle")

        if rank == 0:
            handle = one.module.get_submodule(stage).register_forward_pre_hook(fail)
            try:
                one.check()
            except RuntimeError as error:
                assert "in the middle" in str(error)
            else:
                raise AssertionError("it did not fail")
            handle.remove()
        else:
            one.check()
        one.check()


def a_block_is_left_out_on_one_rank(rank: int) -> None:
    one = Rank(rank)
    usual = one.module.order
    for left_out in (0, 2, 4):
        if rank == 1:
            one.module.order = one.plain.order = usual[:left_out] + usual[left_out + 1 :]
            one.plain.order = [*one.plain.first, *one.plain.second]
            del one.plain.order[left_out]
        one.check()
    one.module.order, one.plain.order = usual, [*one.plain.first, *one.plain.second]
    one.check()


def a_block_out_of_turn_is_an_error_on_its_rank_alone(rank: int) -> None:
    one = Rank(rank)
    usual = one.module.order
    if rank == 0:
        one.module.order = usual[::-1]
        try:
            one.check()
        except GenerationError as error:
            assert "out of turn" in error.message and "--dlo-no-use-allgather" in error.message
        else:
            raise AssertionError("it was not refused")
        one.module.order = usual
    else:
        one.check()
    one.check()


def two_modules_share_the_slots(rank: int) -> None:
    largest = GatherBlocks(toy(3, 2), layout_of(toy(3, 2), block_paths(toy(3, 2))), DEVICE, dist.group.WORLD).slot_bytes
    slots = Slots(2, largest, DEVICE)
    slots.allocate()
    pair = [Rank(rank, slots, seed=1), Rank(rank, slots, seed=2)]
    for turn in (0, 1, 1, 0, 1):
        pair[turn].check() if (turn + rank) % 2 else pair[turn].stream.idle_pass()


def some_blocks_are_resident(rank: int) -> None:
    one = Rank(rank, resident=(0, 3))
    one.check() if rank else one.stream.idle_pass()
    one.check()


SCENARIOS: tuple[Callable[[int], None], ...] = (
    both_compute,
    one_computes_and_one_idles,
    each_keeps_its_part,
    a_pass_fails_on_one_rank,
    a_block_is_left_out_on_one_rank,
    a_block_out_of_turn_is_an_error_on_its_rank_alone,
    two_modules_share_the_slots,
    some_blocks_are_resident,
)


def main(rank: int, store: str) -> None:
    torch.manual_seed(100 + rank)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    for scenario in SCENARIOS:
        problem = None
        try:
            scenario(rank)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"rank": rank, "scenario": scenario.__name__, "problem": problem}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

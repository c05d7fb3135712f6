"""The ring of device buffers that blocks are streamed through."""

from __future__ import annotations

import torch


class Slots:
    """`count` buffers of `nbytes`. Streams whose modules never compute at the same time share them: `user` is the one
    whose blocks are in them now."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        self.count, self.nbytes, self.device = count, nbytes, device
        self.buffers: list[torch.Tensor] = []
        self.user: object | None = None

    def allocate(self) -> None:
        self.buffers = [torch.empty(self.nbytes, dtype=torch.uint8, device=self.device) for _ in range(self.count)]

    def free(self) -> None:
        """Give the memory back; modules with views into it must have let go of them."""
        self.buffers, self.user = [], None


def ring(blocks: int, slots: int) -> list[int]:
    """A slot for each of `blocks` positions that come round again and again: neighbours get different slots, so that
    one is filled while the other computes. With two slots and an odd number the first and the last share one."""
    places = [position % slots for position in range(blocks)]
    if blocks > slots > 2 and places[-1] == 0:
        places[-1] = 1
    return places


def successors(places: list[int]) -> list[int]:
    """For each position the next one, round the ring, that uses its slot; itself if there is no other."""
    count = len(places)
    return [
        next(q % count for q in range(p + 1, p + count + 1) if places[q % count] == places[p]) for p in range(count)
    ]

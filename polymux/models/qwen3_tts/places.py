"""Keys and values of every sentence that is being spoken: each has a place in tensors that all of them share.

So that one step of many sentences reads and writes them without being put together first. What is in a place means
nothing to anybody but who has taken it. Knows layers by their number only.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
FEWEST = (1, 256)  # places and positions
FEWEST_ON_GPU = (8, 1024)  # where more than that means recording graphs again


class Places:
    """Of one decoder. The last position is nobody's: steps write there for places that take no part in them."""

    def __init__(self, layers: int, heads: int, channels: int) -> None:
        self._layers, self._heads, self._channels = layers, heads, channels
        self._free: list[int] = []
        self._known = 0  # places that have been handed out
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def count(self) -> int:
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def positions(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    @property
    def taken(self) -> int:
        """Places that somebody has."""
        return self._known - len(self._free)

    def take(self) -> int:
        """The lowest place that is free, or that will be there when it is written to."""
        if not self._free:
            self._free.append(self._known)
            self._known += 1
        place = min(self._free)
        self._free.remove(place)
        return place

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def ensure(self, place: int, position: int, like: Tensor) -> bool:
        """Have room for this place and position. Whether tensors have moved."""
        fewest = FEWEST_ON_GPU if like.is_cuda else FEWEST
        places, positions = max(self.count, fewest[0]), max(self.positions, fewest[1])
        while places <= place:
            places *= 2
        while positions <= position + 1:
            positions *= 2
        if self.keys and (places, positions) == (self.count, self.positions) and self.keys[0].device == like.device:
            return False
        self.keys = self._grown(self.keys, places, positions, like)
        self.values = self._grown(self.values, places, positions, like)
        return True

    def _grown(self, old: list[Tensor], places: int, positions: int, like: Tensor) -> list[Tensor]:
        made = []
        for layer in range(self._layers):
            new = like.new_zeros(places, self._heads, positions, self._channels)
            if old:
                count, length = old[layer].shape[0], old[layer].shape[2]
                new[:count, :, :length] = old[layer].to(new.device)
            made.append(new)
        return made


class Prompts:
    """As decoder layers know a cache: a prompt's keys and values are put into places, and seen as they are."""

    def __init__(self, places: Places, rows: Tensor) -> None:
        self._places, self._rows = places, rows

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._places.keys[layer][self._rows, :, : key.shape[2]] = key
        self._places.values[layer][self._rows, :, : key.shape[2]] = value
        return key, value


class Steps:
    """The same for one position in each of some places, `rows`: all positions up to `length` are seen. `dense`: they
    are the first ones, in their order."""

    def __init__(self, places: Places, rows: Tensor, positions: Tensor, length: int, dense: bool) -> None:
        self._places, self._rows, self._positions, self._length = places, rows, positions, length
        self._seen: slice | Tensor = slice(len(rows)) if dense else rows

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._places.keys[layer], self._places.values[layer]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        return keys[self._seen, :, : self._length], values[self._seen, :, : self._length]


class Short:
    """A cache of few positions, known beforehand, that lives as long as one frame is written."""

    def __init__(self, layers: int, shape: tuple[int, int, int, int], like: Tensor) -> None:
        self._keys = [like.new_empty(shape) for _ in range(layers)]
        self._values = [like.new_empty(shape) for _ in range(layers)]
        self.length = 0  # before the present forward

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        self._keys[layer][:, :, self.length : end] = key
        self._values[layer][:, :, self.length : end] = value
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

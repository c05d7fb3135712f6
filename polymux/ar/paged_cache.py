"""Keys and values of all sequences, in blocks of one pool for each layer, and which blocks the rows have.

Knows tensors and where things stand; not who owns a block, nor what attention does with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

import torch

from polymux.ar.blocks import TRASH


@dataclass(frozen=True)
class Shape:
    """Of what a network keeps of each token."""

    layers: int
    heads: int  # of keys and values
    channels: int  # of a head
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.channels * self.dtype.itemsize


@dataclass(frozen=True)
class Steps:
    """A batch of sequences that go on by one token each, from `positions` (tokens), in `rows` (tokens). Each token's
    keys and values go to `slots` (tokens)."""

    positions: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Stretch:
    """Tokens `begin` to `end` of a batch are the last ones of a sequence of `length` tokens, in these blocks."""

    begin: int
    end: int
    length: int
    blocks: torch.Tensor


@dataclass(frozen=True)
class Wholes:
    """Prompts that are whole in a batch and of similar length, side by side: `index` (prompts, tokens) says which token
    of the batch stands where, filled up behind the ends. `tokens` are all of theirs, and `places` where those stand."""

    index: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Stretches:
    """A batch of pieces of prompts."""

    slots: torch.Tensor
    stretches: tuple[Stretch, ...]
    wholes: tuple[Wholes, ...]


@dataclass(frozen=True)
class Looks:
    """(tokens, heads, channels) of a layer's queries, keys and values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Layer:
    """What one layer keeps: (blocks, tokens of a block, heads, channels). `table` (rows, blocks): the rows' blocks."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """(tokens, heads, channels)"""
        self.keys.flatten(0, 1).index_copy_(0, slots, keys)
        self.values.flatten(0, 1).index_copy_(0, slots, values)

    def read(self, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first `length` tokens in these blocks: (1, heads, tokens, channels)."""
        wanted = blocks[: -(-length // self.block_size)]
        keys, values = (kept[wanted].flatten(0, 1)[:length] for kept in (self.keys, self.values))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


@dataclass(frozen=True)
class Room:
    """How much of a cache there is. `rows`: sequences that may run at once; `context`: the most tokens of one."""

    blocks: int
    block_size: int
    rows: int
    context: int


class PagedCache:
    """`batch` is what runs now."""

    def __init__(self, shape: Shape, room: Room, device: torch.device, handle: int | None = None) -> None:
        """`handle`: of a cache that is gone, and was known by this number."""
        self.blocks, self.block_size, self.rows, self.device = room.blocks, room.block_size, room.rows, device
        size = (room.blocks + 1, room.block_size, shape.heads, shape.channels)  # with the block that is nobody's
        self.table = torch.full(  # the last row is nobody's
            (room.rows + 1, -(-room.context // room.block_size)), TRASH, dtype=torch.int32, device=device
        )
        pools = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2 * shape.layers)]
        self._layers = [Layer(keys, values, self.table) for keys, values in zip(pools[::2], pools[1::2], strict=True)]
        self.batch: Steps | Stretches | None = None
        self.handle = next(_HANDLES) if handle is None else handle
        _OPEN[self.handle] = self

    def layer(self, index: int) -> Layer:
        return self._layers[index]

    def slot(self, blocks: list[int], position: int) -> int:
        """Where the token at `position` of a sequence with these blocks is kept."""
        return blocks[position // self.block_size] * self.block_size + position % self.block_size


_HANDLES = count()
_OPEN: WeakValueDictionary[int, PagedCache] = WeakValueDictionary()


def opened(handle: int) -> PagedCache:
    """The cache of this number: compiled code knows numbers, and nothing of caches."""
    return _OPEN[handle]

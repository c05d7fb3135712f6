"""The packed weight file: valid safetensors whose tensors stand in block order, each block one page-aligned range.

A block's range is an image of the memory that a device slot holds, so that one copy moves a block. Safetensors allows
no holes: what lies between tensors are tensors too, of zeros, whose names begin with `__padding__`. A header has one
encoding only: what is parsed is built again and compared byte for byte. Knows neither torch nor how files get written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from polymux.errors import CacheError

FORMAT = "polymux-blocks"
FORMAT_VERSION = 1
PADDING = "__padding__"
BLOCK_ALIGNMENT = 64 * 1024  # bytes; a multiple of every page size that Linux uses (4, 16 and 64 KiB)
TENSOR_ALIGNMENT = 256  # bytes; what a CUDA allocation gives, and enough for any kernel's vector loads
MAX_HEADER = 100 * 2**20  # bytes; the safetensors library refuses more

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one element, by safetensors' names of the dtypes. Types of less than a byte are not supported."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor before it has a place. `dtype` is safetensors' name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class BlockSpec(msgspec.Struct, frozen=True):
    """Tensors that move together."""

    name: str
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class PlacedTensor:
    """`offset`: from the beginning of its block."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True)
class PlacedBlock:
    """`offset`: from the beginning of the file. `nbytes`: with the padding at its end."""

    name: str
    offset: int
    nbytes: int
    tensors: tuple[PlacedTensor, ...]


@dataclass(frozen=True)
class FileLayout:
    """Where every byte of a packed file stands."""

    blocks: tuple[BlockSpec, ...]

    @classmethod
    def of(cls, blocks: Iterable[BlockSpec]) -> FileLayout:
        """Raises CacheError if a packed file cannot hold these tensors."""
        layout = cls(tuple(blocks))
        _check(layout.blocks)
        if len(layout.header) > MAX_HEADER:
            raise CacheError(f"a header of {len(layout.header)} bytes is more than safetensors allows ({MAX_HEADER})")
        return layout

    @classmethod
    def parse(cls, header: bytes) -> FileLayout:
        """The layout that a file's first bytes describe. Raises CacheError if they are not what `header` makes."""
        try:
            parsed = msgspec.json.decode(header[8:])
            names = msgspec.json.decode(parsed["__metadata__"]["blocks"], type=list[tuple[str, list[str]]])
            layout = cls.of(
                BlockSpec(block, tuple(_spec(tensor, parsed[tensor]) for tensor in tensors)) for block, tensors in names
            )
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise CacheError(f"damaged header: {type(error).__name__}: {error}") from None
        if layout.header != header:
            raise CacheError("damaged header: it is not what its own list of tensors makes")
        return layout

    @cached_property
    def placed(self) -> tuple[PlacedBlock, ...]:
        """Where each block is in the file."""
        placed, offset = [], len(self.header)
        for block in self.blocks:
            tensors, nbytes = _place(block)
            placed.append(PlacedBlock(block.name, offset, nbytes, tensors))
            offset += nbytes
        return tuple(placed)

    @property
    def file_size(self) -> int:
        return len(self.header) + sum(nbytes for _, nbytes in map(_place, self.blocks))

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes: the length, the JSON, and spaces up to the first block."""
        blocks = [(block.name, [tensor.name for tensor in block.tensors]) for block in self.blocks]
        metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "blocks": msgspec.json.encode(blocks).decode()}
        entries: dict[str, Any] = {"__metadata__": metadata}
        for name, dtype, shape, start, end in self._ranges():
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = msgspec.json.encode(entries)
        length = _up(8 + len(text), BLOCK_ALIGNMENT) - 8
        return length.to_bytes(8, "little") + text.ljust(length, b" ")

    def _ranges(self) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        """Every tensor and every gap, in order: name, dtype, shape, first byte and end, from the first block on."""
        start, gaps = 0, 0
        for block in self.blocks:
            tensors, nbytes = _place(block)
            at = 0
            for offset, end, spec in [*((t.offset, t.end, t.spec) for t in tensors), (nbytes, nbytes, None)]:
                if offset > at:
                    yield f"{PADDING}.{gaps}", "U8", (offset - at,), start + at, start + offset
                    gaps += 1
                if spec is not None:
                    yield spec.name, spec.dtype, spec.shape, start + offset, start + end
                at = end
            start += nbytes


def _place(block: BlockSpec) -> tuple[tuple[PlacedTensor, ...], int]:
    """A block's tensors in its image, and the size of the image."""
    placed, at = [], 0
    for spec in block.tensors:
        tensor = PlacedTensor(spec, _up(at, TENSOR_ALIGNMENT))
        placed.append(tensor)
        at = tensor.end
    return tuple(placed), _up(at, BLOCK_ALIGNMENT)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check(blocks: tuple[BlockSpec, ...]) -> None:
    names: set[str] = set()
    for tensor in (tensor for block in blocks for tensor in block.tensors):
        if tensor.dtype not in ITEM_BYTES:
            raise CacheError(f"tensor {tensor.name!r}: dtype {tensor.dtype} is not supported")
        if any(size < 0 for size in tensor.shape):
            raise CacheError(f"tensor {tensor.name!r}: impossible shape {list(tensor.shape)}")
        if tensor.name in names or tensor.name.startswith("__"):
            raise CacheError(f"tensor {tensor.name!r}: the name is taken")
        names.add(tensor.name)
    if len({block.name for block in blocks}) < len(blocks):
        raise CacheError("two blocks of one name")


def _spec(name: str, entry: Any) -> TensorSpec:
    """One tensor's entry in a header. Raises msgspec.ValidationError; wrong offsets are found later."""
    return msgspec.convert({"name": name, "dtype": entry["dtype"], "shape": entry["shape"]}, TensorSpec)

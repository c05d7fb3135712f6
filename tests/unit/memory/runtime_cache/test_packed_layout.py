"""The packed file: every safetensors reader understands it, and blocks are page-aligned ranges in order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from polymux.errors import CacheError
from polymux.memory.runtime_cache.layout import (
    BLOCK_ALIGNMENT,
    PADDING,
    TENSOR_ALIGNMENT,
    BlockSpec,
    FileLayout,
    TensorSpec,
)

BLOCKS = (
    BlockSpec("rest", (TensorSpec("b", "F32", (3,)), TensorSpec("a", "F32", (2, 5)), TensorSpec("scalar", "I64", ()))),
    BlockSpec("blocks.0", (TensorSpec("blocks.0.w", "F16", (300, 301)), TensorSpec("blocks.0.empty", "F32", (0, 4)))),
    BlockSpec("blocks.1", ()),
    BlockSpec("blocks.2", (TensorSpec("blocks.2.w", "U8", (BLOCK_ALIGNMENT,)),)),
)


def write(layout: FileLayout, file: Path) -> dict[str, np.ndarray]:
    """Random bytes where tensors are, zeros elsewhere."""
    data, values = bytearray(layout.file_size), {}
    data[: len(layout.header)] = layout.header
    kinds = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8}
    for block in layout.placed:
        for tensor in block.tensors:
            value = np.random.default_rng(1).integers(0, 100, tensor.spec.shape).astype(kinds[tensor.spec.dtype])
            values[tensor.spec.name] = value
            data[block.offset + tensor.offset : block.offset + tensor.end] = value.tobytes()
    file.write_bytes(data)
    return values


def test_safetensors_reads_it(tmp_path: Path) -> None:
    values = write(FileLayout.of(BLOCKS), tmp_path / "file.safetensors")
    with safe_open(tmp_path / "file.safetensors", "np") as file:
        assert file.metadata()["format"] == "polymux-blocks"
        assert {name for name in file.keys() if not name.startswith(PADDING)} == values.keys()  # noqa: SIM118
        for name, value in values.items():
            np.testing.assert_array_equal(file.get_tensor(name), value, strict=True)
        for name in file.keys():  # noqa: SIM118
            if name.startswith(PADDING):
                assert not file.get_tensor(name).any()


def test_blocks_are_aligned_ranges_in_order() -> None:
    layout = FileLayout.of(BLOCKS)
    assert [block.name for block in layout.placed] == [block.name for block in BLOCKS]
    end = len(layout.header)
    for block in layout.placed:
        assert block.offset == end
        assert block.offset % BLOCK_ALIGNMENT == block.nbytes % BLOCK_ALIGNMENT == 0
        assert all(tensor.offset % TENSOR_ALIGNMENT == 0 for tensor in block.tensors)
        end += block.nbytes
    assert end == layout.file_size


def test_a_header_gives_its_layout_back() -> None:
    layout = FileLayout.of(BLOCKS)
    assert FileLayout.parse(layout.header) == layout


def changed(header: bytes, old: str, new: str) -> bytes:
    text = header[8:].decode().rstrip()
    assert old in text
    return header[:8] + text.replace(old, new, 1).encode().ljust(len(header) - 8)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("F16", "F32"),
        ("[0,12]", "[0,16]"),
        ('"version":"1"', '"version":"2"'),
        ('{"dtype":"F32","shape":[3]', '{"dtype":"F32","shape":[-3]'),
        ("F16", "F61"),
        ("{", "["),
        ('"__padding__.0"', '"__padding__.7"'),
    ],
)
def test_a_changed_header_is_refused(old: str, new: str) -> None:
    header = changed(FileLayout.of(BLOCKS).header, old, new)
    with pytest.raises(CacheError, match=r"header|tensor"):
        FileLayout.parse(header)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (1,))), "'a': the name is taken"),
        ((TensorSpec("__metadata__", "F32", (1,)),), "the name is taken"),
        ((TensorSpec("a", "F4", (1,)),), "F4 is not supported"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(tensors: tuple[TensorSpec, ...], reason: str) -> None:
    with pytest.raises(CacheError, match=reason):
        FileLayout.of([BlockSpec("block", tensors)])


def test_the_header_is_json_with_spaces_behind() -> None:
    header = FileLayout.of(BLOCKS).header
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:])["a"] == {"dtype": "F32", "shape": [2, 5], "data_offsets": [256, 296]}

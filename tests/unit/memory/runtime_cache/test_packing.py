"""A module's tensors survive the way into a file and back, bit for bit; what would not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_models import BLOCKS, Model, model, model_layout, published
from safetensors.torch import load_file

from polymux.errors import CacheError
from polymux.memory.layout import all_tensors, bind, layout_of
from polymux.memory.runtime_cache.entry import Entry
from polymux.memory.runtime_cache.manifest import WEIGHTS
from polymux.memory.runtime_cache.mapped import Mapping
from polymux.memory.runtime_cache.packing import check_fits, file_layout, module_layout, reader


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return published(tmp_path / "cache", model())


def assert_same(module: torch.nn.Module, other: torch.nn.Module) -> None:
    wanted = dict(all_tensors(other))
    for name, tensor in all_tensors(module):
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name


def test_a_module_made_on_meta_gets_everything_from_the_mapping(entry: Entry) -> None:
    with torch.device("meta"):
        empty = Model()
    mapping = Mapping(entry)
    check_fits(empty, mapping.layout)
    bind(empty, mapping.layout.rest, mapping.rest)
    for i, image in enumerate(mapping.layout.blocks):
        bind(empty, image, mapping.image(i))
    assert_same(empty, model())
    low, high = mapping.memory.data_ptr(), mapping.memory.data_ptr() + mapping.memory.nbytes
    assert all(low <= tensor.data_ptr() < high for _, tensor in all_tensors(empty)), "nothing is copied"


def test_buffers_that_were_made_wrong_become_right(entry: Entry) -> None:
    """A module that computes its buffers otherwise, as another version of a library might."""
    wrong, mapping = model(), Mapping(entry)
    for buffer in wrong.buffers():
        buffer.zero_()
    for i, image in enumerate(mapping.layout.blocks):
        bind(wrong, image, mapping.image(i))
    bind(wrong, mapping.layout.rest, mapping.rest)
    assert_same(wrong, model())


def test_the_layout_of_the_file_is_that_of_the_module(entry: Entry) -> None:
    assert module_layout(entry.layout) == model_layout(model())


def test_safetensors_reads_the_same_weights(entry: Entry) -> None:
    held = load_file(entry.path / WEIGHTS)
    for name, tensor in all_tensors(model()):
        assert torch.equal(held[name], tensor)


def test_a_tied_tensor_is_refused() -> None:
    tied = model()
    tied.blocks[0].linear.bias = tied.blocks[0].norm.bias
    with pytest.raises(CacheError, match=r"'blocks\.0\.linear\.bias' is tied to 'blocks\.0\.norm\.bias'"):
        file_layout(model_layout(tied))


def test_tensors_that_share_memory_are_refused() -> None:
    shared = model()
    memory = torch.zeros(20)
    shared.blocks[0].linear.bias.data = memory[:6]
    shared.blocks[0].norm.bias.data = memory[4:10]
    with pytest.raises(CacheError, match="share memory"):
        reader(shared)
    shared.blocks[0].norm.bias.data = memory[6:12]
    reader(shared)


def test_a_memory_format_of_its_own_is_refused() -> None:
    convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with pytest.raises(CacheError, match="'weight' is not contiguous"):
        file_layout(layout_of(convolution, ()))


def test_a_dtype_that_safetensors_lacks_is_refused() -> None:
    odd = torch.nn.Module()
    odd.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CacheError, match=r"'phase': dtype torch\.complex64"):
        file_layout(layout_of(odd, ()))


def test_another_module_is_refused(entry: Entry) -> None:
    other = model()
    other.blocks[1].norm.weight.data = torch.zeros(7)
    with pytest.raises(
        CacheError, match=r"'blocks\.1\.norm\.weight' has shape \[301\] in the entry, Model needs \[7\]"
    ):
        check_fits(other, module_layout(entry.layout))
    other = model()
    other.register_buffer("another", torch.zeros(1))
    with pytest.raises(CacheError, match=r"'another' has shape none in the entry"):
        check_fits(other, module_layout(entry.layout))


def test_blocks_keep_their_order(entry: Entry) -> None:
    assert [block.name for block in entry.layout.blocks] == ["", *BLOCKS]

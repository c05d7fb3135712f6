"""The host side of complete blocks that independent engines stream: the first of these that there is.

    a runtime cache that the device can read     one copy per host, at the speed of the bus
    a runtime cache, staged                      one copy per host, through a few pinned pieces
    the checkpoint's own mapping, staged         the same, where loading left the tensors as they are on file
    private pinned memory                        a copy per engine, at the speed of the bus

Which components are mapped was decided when they were loaded; what is streamed, and when, is not known here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from polymux.memory.base import HostBlocks, Layout
from polymux.memory.byte_source import FileBytes, TensorBytes
from polymux.memory.layout import layout_of, tensor_at
from polymux.memory.residency import Tenant, private_blocks
from polymux.memory.runtime_cache.mapped import CudaRegistrar, MappedBlocks, Mapping
from polymux.memory.staging import StagedBlocks, StagingSettings


class HostBacking:
    """Is a `residency.MakeBlocks`. Takes over the mappings of the components that it is asked for."""

    def __init__(self, mappings: dict[str, Mapping], pin_limit: int) -> None:
        """`pin_limit`: bytes of a mapping that may be registered with the device."""
        self._mappings = mappings
        self._pin_limit = pin_limit

    def __call__(
        self, tenant: Tenant, paths: Sequence[str], resident: Sequence[int], device: torch.device
    ) -> tuple[HostBlocks, Sequence[int]]:
        mapping = self._mappings.pop(tenant.name, None)
        if mapping is not None:
            assert [image.name for image in mapping.layout.blocks] == list(paths), "loading asked the same question"
            return cached_blocks(mapping, device, self._pin_limit), resident
        layout = layout_of(tenant.module, paths)
        if device.type != "cpu" and is_file_mapped(tenant.module, layout):
            source = TensorBytes(tenant.module, layout, "the checkpoint's files")
            return StagedBlocks(source, device), resident
        return private_blocks(tenant, paths, resident, device)


def cached_blocks(mapping: Mapping, device: torch.device, pin_limit: int) -> HostBlocks:
    """The blocks of a cache entry: straight from the mapping where the device can read it, else staged from the file.

    Raises PinnedMemoryError if registering left the mapping in a state that nobody knows.
    """
    if device.type == "cpu":
        return MappedBlocks(mapping, device)
    if pin_limit and mapping.register(CudaRegistrar(device), pin_limit):
        return MappedBlocks(mapping, device)
    staged = staged_entry(mapping, device)
    mapping.close()
    return staged


def staged_entry(mapping: Mapping, device: torch.device, settings: StagingSettings | None = None) -> StagedBlocks:
    """The blocks of a cache entry, read from its file. The file stays in use; the mapping may be closed."""
    source = FileBytes(mapping.layout, f"of runtime cache {mapping.name}", mapping.fileno(), mapping.offsets)
    return StagedBlocks(source, device, settings)


def is_file_mapped(module: torch.nn.Module, layout: Layout) -> bool:
    """Whether all tensors of all blocks are views of mapped files, whose pages are no memory of this process's own."""
    tensors = [tensor_at(module, place.names[0]) for image in layout.blocks for place in image.places if place.nbytes]
    return all(t.device.type == "cpu" for t in tensors) and _in_files((t.data_ptr(), t.nbytes) for t in tensors)


def _in_files(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether these ranges of addresses lie in mappings of files."""
    starts: list[int] = []
    ends: list[int] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if inode == "0":
            continue
        if ends and ends[-1] == start:  # the parts of a mapping with different rights
            ends[-1] = end
        else:
            starts.append(start)
            ends.append(end)
    found = ((at, size, bisect_right(starts, at) - 1) for at, size in spans)
    return all(k >= 0 and at + size <= ends[k] for at, size, k in found)

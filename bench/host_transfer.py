"""How fast blocks come from the host to the device, by every way there is, without anything that computes.

    python bench/host_transfer.py                            the table, 16 GiB in 24 blocks
    python bench/host_transfer.py --gib 0.25 --blocks 6      small, for a look at how it works (also on a CPU)

Publishes random blocks to a runtime cache in --dir (which needs as much room as --gib says), then fetches all of them
again and again through two slots, as block streaming does. "pinned" is the floor of the others. For staging, the
threads and the size of the pieces are varied, and reading the file is compared with copying out of a mapping. Prints
seconds for publishing, for opening an entry with and without full verification, and for registering it, and this
process's memory by kind. Every block's bytes are compared once with what was published.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from polymux.memory.backing import staged_entry
from polymux.memory.base import HostBlocks
from polymux.memory.byte_source import TensorBytes
from polymux.memory.layout import bind, layout_of
from polymux.memory.private_blocks import PrivateBlocks
from polymux.memory.runtime_cache import CacheSettings, Content, Entry, Identity, RuntimeCache
from polymux.memory.runtime_cache.mapped import CudaRegistrar, MappedBlocks, Mapping
from polymux.memory.runtime_cache.packing import file_layout, reader
from polymux.memory.staging import StagedBlocks, StagingSettings

PASSES = 3


def make(blocks: int, nbytes: int) -> torch.nn.Module:
    """Blocks of one matrix and one vector each, filled with random bits."""
    width = 4096
    module = torch.nn.Module()
    for index in range(blocks):
        block = torch.nn.Module()
        block.matrix = torch.nn.Parameter(bits(nbytes // width // 2, width), requires_grad=False)
        block.vector = torch.nn.Parameter(bits(1, width), requires_grad=False)
        module.add_module(str(index), block)
    return module


def twin(module: torch.nn.Module) -> torch.nn.Module:
    """The same tensors in another module, which may lose them."""
    made = torch.nn.Module()
    for name, block in module.named_children():
        made.add_module(name, torch.nn.Module())
        for key, value in block.named_parameters():
            made.get_submodule(name).register_parameter(key, torch.nn.Parameter(value.data, requires_grad=False))
    return made


def bits(rows: int, columns: int) -> torch.Tensor:
    raw = torch.empty(rows * columns // 4, dtype=torch.int64).random_(-(2**62), 2**62)
    return raw.view(torch.bfloat16).view(rows, columns)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class Fetching:
    """All blocks, one after the other, through two slots. The first pass compares the bytes."""

    def __init__(self, source: HostBlocks, expected: list[torch.Tensor], device: torch.device) -> None:
        self.source, self.expected, self.device = source, expected, device
        self.slots = [torch.empty(source.slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        source.expect(range(len(source.layout.blocks)))

    def compare(self) -> None:
        for index, place in enumerate(image.places[0] for image in self.source.layout.blocks):
            self.source.fetch(index, self.slots[0], self.now()).wait()
            wanted = self.expected[index].to(self.device).view(torch.uint8)
            assert torch.equal(place.view(self.slots[0]).view(torch.uint8), wanted), f"block {index} is wrong"

    def once(self) -> None:
        pending = None
        for index in range(len(self.source.layout.blocks)):
            arrival = self.source.fetch(index, self.slots[index % 2], self.now())
            if pending is not None:
                pending.wait()
            pending = arrival
        assert pending is not None
        pending.wait()

    def now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


class Report:
    """One line per way, with its share of the floor."""

    def __init__(self, expected: list[torch.Tensor], device: torch.device) -> None:
        self.expected, self.device = expected, device
        self.floor = 0.0

    def add(self, name: str, source: HostBlocks) -> None:
        nbytes = sum(image.nbytes for image in source.layout.blocks)
        fetching = Fetching(source, self.expected, self.device)
        fetching.compare()
        fetching.once()
        took = min(seconds(fetching.once, self.device) for _ in range(PASSES))
        source.close()
        rate = nbytes / took / 1e9
        self.floor = self.floor or rate
        print(f"{name:44s} {took * 1e3:9.1f} ms {rate:8.2f} GB/s {rate / self.floor:6.1%} of pinned", flush=True)


def memory() -> str:
    wanted = ("Pss:", "Pss_File:", "Private_Dirty:")
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return ", ".join(f"{name} {int(kib) / 2**20:.2f} GiB" for name, kib, _ in lines if name in wanted)


def published(cache: RuntimeCache, identity: Identity, module: torch.nn.Module) -> None:
    start = time.perf_counter()
    content = Content(identity, "bench", file_layout(layout_of(module, identity.blocks)), reader(module))
    with cache.turn(identity) as turn:
        turn.publish(content)
        assert turn.entry is not None, "not written: see the log"
    print(f"published and synced in {time.perf_counter() - start:.2f} s")


def opened(cache: RuntimeCache, identity: Identity) -> Entry:
    start = time.perf_counter()
    entry = cache.open_or_none(identity)
    assert entry is not None
    print(f"opened and checked in {(time.perf_counter() - start) * 1e3:.1f} ms", end="")
    start = time.perf_counter()
    assert entry.damaged_blocks(cache.settings.threads) == []
    print(f"; all bytes verified in {time.perf_counter() - start:.2f} s by {cache.settings.threads} threads")
    return entry


def staging(
    report: Report, entry: Entry, module: torch.nn.Module, device: torch.device, threads: list[int], pieces: list[int]
) -> None:
    mapping = Mapping(entry)
    for index, image in enumerate(mapping.layout.blocks):
        bind(module, image, mapping.image(index))
    layout = layout_of(module, [image.name for image in mapping.layout.blocks])
    for count in threads:
        for mib in pieces:
            settings = StagingSettings(piece_bytes=mib * 2**20, threads=count)
            report.add(f"staged, file read, {count} threads, {mib} MiB", staged_entry(mapping, device, settings))
            copied = StagedBlocks(TensorBytes(module, layout, "mapping"), device, settings)
            report.add(f"staged, mapping copied, {count} threads, {mib} MiB", copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 8, 12, 16])
    parser.add_argument("--pieces", type=int, nargs="+", default=[4, 8, 16, 32], help="MiB")
    parser.add_argument("--dir", type=Path, default=None, help="where the cache is made (default: a temporary folder)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    root = Path(tempfile.mkdtemp(dir=arguments.dir))
    cache = RuntimeCache(CacheSettings(root=root, threads=max(arguments.threads)))
    paths = tuple(str(i) for i in range(arguments.blocks))
    identity = Identity(model_class="bench", sources=(), libraries=(), blocks=paths, dtype="bfloat16")
    try:
        module = make(arguments.blocks, int(arguments.gib * 2**30) // arguments.blocks)
        published(cache, identity, module)
        expected = [module.get_parameter(f"{path}.matrix").data for path in paths]
        report = Report(expected, device)
        report.add("private pinned", PrivateBlocks(twin(module), layout_of(module, paths), device))
        with opened(cache, identity) as entry:
            if device.type == "cuda":
                mapping = Mapping(entry)
                took = seconds(lambda: mapping.register(CudaRegistrar(device), 2**60), device)
                print(f"registered: {mapping.registered}, in {took:.2f} s; {memory()}")
                if mapping.registered:
                    report.add("mapping, registered", MappedBlocks(mapping, device))
            else:
                report.add("mapping", MappedBlocks(Mapping(entry), device))
            staging(report, entry, module, device, arguments.threads, arguments.pieces)
        print(f"at the end: {memory()}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

"""Three processes with the same weights, and the memory that they take together.

    python pss_processes.py ROOT MIB mapped|private

Publishes an entry of so many MiB and forks three processes, each of which opens it by itself and reads all of it.
Prints the sum of what their proportional set sizes grew by, in bytes. "private" copies the weights, for comparison.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from polymux.memory.layout import layout_of
from polymux.memory.runtime_cache import CacheSettings, Content, Identity, RuntimeCache
from polymux.memory.runtime_cache.mapped import Mapping
from polymux.memory.runtime_cache.packing import file_layout, reader

PROCESSES = 3
IDENTITY = Identity(model_class="Big", sources=(), libraries=(), blocks=("0", "1", "2", "3"), dtype="float32")


def pss() -> int:
    """Bytes of this process, shared pages divided by how many processes share them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


def publish(root: Path, mib: int) -> None:
    """In a process of its own: PyTorch's threads must not be there before the fork."""
    module = torch.nn.Sequential(*(torch.nn.Linear(1024, mib * 2**20 // 4096 // 4, bias=False) for _ in range(4)))
    module.requires_grad_(False)
    layout = layout_of(module, IDENTITY.blocks)
    with RuntimeCache(CacheSettings(root=root)).turn(IDENTITY) as turn:
        turn.publish(Content(IDENTITY, "big", file_layout(layout), reader(module)))


def measure(number: int, root: Path, private: bool, barrier: Barrier) -> int:
    before = pss()
    entry = RuntimeCache(CacheSettings(root=root)).open_or_none(IDENTITY)
    assert entry is not None
    mapping = Mapping(entry)
    entry.close()
    memory = mapping.memory.clone() if private else mapping.memory
    memory.view(torch.int64).sum()
    if private:
        del mapping
    barrier.wait()  # all have touched everything
    grown = pss() - before
    barrier.wait()  # and all have counted before one leaves
    return grown


def main() -> None:
    root, mib, private = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "private"
    fork = get_context("fork")
    writer = fork.Process(target=publish, args=(root, mib))
    writer.start()
    writer.join()
    torch.set_num_threads(1)
    barrier, results = fork.Barrier(PROCESSES), fork.SimpleQueue()

    def child(number: int) -> None:
        results.put(measure(number, root, private, barrier))

    children = [fork.Process(target=child, args=(i,)) for i in range(PROCESSES)]
    for process in children:
        process.start()
    print(sum(results.get() for _ in children))
    for process in children:
        process.join()


if __name__ == "__main__":
    main()

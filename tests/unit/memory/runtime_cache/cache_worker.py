"""A worker of an engine as far as the runtime cache sees it, without a model: for tests with several processes.

    python cache_worker.py '{"root": "...", "die_at": "SYNCED", ...}'

Says "ready" and waits for a line on its standard input before it does anything; then one line of JSON with what
happened. With "hold" it keeps the entry mapped, all of it read, until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import signal
import sys
import time
from pathlib import Path

import msgspec

from polymux.memory.runtime_cache.cache import CacheSettings, RuntimeCache
from polymux.memory.runtime_cache.identity import Identity
from polymux.memory.runtime_cache.layout import BlockSpec, FileLayout, TensorSpec
from polymux.memory.runtime_cache.publish import Content, Stage

BLOCKS = 5


class Job(msgspec.Struct, kw_only=True):
    root: str
    version: str = "1"  # another version is another identity
    kib: int = 100  # of each tensor
    lock_timeout_s: float = 60.0
    limit: int | None = None
    verify_full: bool = False
    die_at: str | None = None
    load_s: float = 0.0
    hold: bool = False
    max_file_bytes: int | None = None
    unprivileged: bool = False


def identity_of(job: Job) -> Identity:
    return Identity(
        model_class="tests.Model",
        sources=(),
        libraries=(("tests", job.version),),
        blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)),
        dtype="float32",
    )


def data_of(name: str, job: Job) -> bytes:
    pattern = f"{name}/{job.version};".encode()
    nbytes = nbytes_of(name, job)
    return (pattern * (nbytes // len(pattern) + 1))[:nbytes]


def nbytes_of(name: str, job: Job) -> int:
    return 4 * (job.kib * 256 + len(name))  # no multiple of anything


def layout_of(job: Job) -> FileLayout:
    def block(name: str) -> BlockSpec:
        names = [f"{name}.weight", f"{name}.long_bias"]
        return BlockSpec(name, tuple(TensorSpec(n, "F32", (nbytes_of(n, job) // 4,)) for n in names))

    return FileLayout.of(map(block, ["rest", *identity_of(job).blocks]))


def content_of(job: Job) -> Content:
    return Content(identity_of(job), f"tests/{job.version}", layout_of(job), lambda n: memoryview(data_of(n, job)))


def cache_of(job: Job) -> RuntimeCache:
    settings = CacheSettings(
        root=Path(job.root),
        lock_timeout_s=job.lock_timeout_s,
        limit=job.limit,
        verify_full=job.verify_full,
        threads=2,
    )
    return RuntimeCache(settings)


def die_at(stage: str | None, reached: Stage) -> None:
    if reached.name == stage:
        os.kill(os.getpid(), signal.SIGKILL)


def run(job: Job) -> None:
    with cache_of(job).turn(identity_of(job)) as turn:
        loaded = turn.entry is None
        if loaded:
            time.sleep(job.load_s)
        wrote = False
        if turn.may_write:
            turn.publish(content_of(job), lambda stage: die_at(job.die_at, stage))
            wrote = turn.entry is not None
        mapped = None
        right = None
        if turn.entry is not None:
            mapped = mmap.mmap(turn.entry.file.fileno(), turn.entry.layout.file_size, prot=mmap.PROT_READ)
            right = all(
                mapped[block.offset + t.offset : block.offset + t.end] == data_of(t.spec.name, job)
                for block in turn.entry.layout.placed
                for t in block.tensors
            )
    print(json.dumps({"loaded": loaded, "wrote": wrote, "right": right}), flush=True)
    if job.hold:
        sys.stdin.read()
    del mapped


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if job.unprivileged and os.getuid() == 0:
        os.setuid(65534)
    if job.max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.max_file_bytes, job.max_file_bytes))
    print("ready", flush=True)
    sys.stdin.readline()
    run(job)


if __name__ == "__main__":
    main()

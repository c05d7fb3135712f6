"""Numbers of this machine: bus speed, memory that is free, memory that this process uses."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Literal

import torch

from polymux.errors import ConfigError
from polymux.memory.pinned import PinnedBuffer
from polymux.memory.plan import GIB, size

SAMPLE = 256 * 2**20  # bytes
HEADROOM = GIB // 2  # of the free memory, for what torch does not count: library workspaces, kernels


def bandwidth(device: torch.device, sample: int = SAMPLE) -> float:
    """Bytes per second from pinned host memory to the device."""
    buffer = PinnedBuffer(sample)
    buffer.tensor.fill_(1)
    if device.type == "cuda":
        buffer.pin()
    target = torch.empty(sample, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(buffer.tensor, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    buffer.close()
    return sample / min(times)


def limit_bytes(limit: float | Literal["auto"], device: torch.device) -> int | None:
    """What --gpu-memory-limit-gib comes to. None: a CPU, where auto is no limit. Raises ConfigError."""
    if device.type != "cuda":
        return None if limit == "auto" else int(limit * GIB)
    free, total = torch.cuda.mem_get_info(device)
    if limit == "auto":
        return free - HEADROOM
    wanted = int(limit * GIB)
    if wanted > total:
        raise ConfigError(
            f"--gpu-memory-limit-gib {limit:g}: the device has {size(total)}", param="gpu_memory_limit_gib"
        )
    return wanted


def used_bytes(device: torch.device) -> int:
    """Memory that this process holds: of the GPU, or for a CPU of the host (its resident set)."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def resident_bytes() -> int:
    """Memory of the host that this process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def device_bytes(device: torch.device) -> dict[str, int]:
    """Memory of the GPU that this process holds, by what it is for; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


def release(device: torch.device) -> None:
    """Give memory that is not in use back to the system. Modules refer to themselves in circles, so collect first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

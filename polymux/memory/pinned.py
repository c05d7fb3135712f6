"""Host memory that a GPU reads at full speed.

torch's own pinned memory is rounded up to a power of two, which for weights may mean twice the memory. This is exactly
as large as it must be, page-aligned, and backed by huge pages where the kernel gives them.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from polymux.errors import ConfigError, PinnedMemoryError
from polymux.memory.base import PAGE


class PinnedBuffer:
    """Private, zeroed memory. Pages come into being when they are written, so fill it first and `pin` it then."""

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, max(nbytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(mmap.MADV_DONTFORK)  # a device reads these very pages: no child may make them copy-on-write
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        self.nbytes = len(memory)
        self._pinned = False

    def pin(self) -> None:
        """Register the memory with the current CUDA device. Raises ConfigError where the system does not let us."""
        status = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0))  # type: ignore[no-untyped-call]
        if status != 0:
            raise ConfigError(
                f"{self.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {status}); "
                "see how much memory may be locked (ulimit -l) and how much is free"
            )
        self._pinned = True

    def close(self) -> None:
        """Unpin. The device must have finished with it; the memory goes when the last tensor in it goes."""
        if self._pinned:
            self._pinned = False
            status = int(torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr()))  # type: ignore[no-untyped-call]
            if status != 0:
                raise PinnedMemoryError(f"{self.nbytes} bytes of host memory cannot be unpinned (CUDA error {status})")
        self.tensor = torch.empty(0, dtype=torch.uint8)

"""Host memory that a GPU reads at full speed.

torch's own pinned memory is rounded up to a power of two, which for weights may mean twice the memory. This is exactly
as large as it must be, page-aligned, and backed by huge pages where the kernel gives them.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
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
        self._array: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(memory, dtype=np.uint8)
        self.tensor = torch.from_numpy(self._array)[:nbytes]
        self.nbytes = len(memory)
        self._unpin: weakref.finalize[[int], object] | None = None

    def pin(self) -> None:
        """Register the memory with the current CUDA device. Raises ConfigError where the system does not let us."""
        assert self._array is not None, "closed"
        address = self._array.ctypes.data  # not the tensor's: one without elements has none
        status = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))  # type: ignore[no-untyped-call]
        if status != 0:
            forget_error()
            raise ConfigError(
                f"{self.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {status}); "
                "see how much memory may be locked (ulimit -l) and how much is free"
            )
        # The driver must forget the pages before they are unmapped, also if nobody calls `close`: the array's end comes
        # before that of the mapping below it.
        self._unpin = weakref.finalize(self._array, unregister, address)
        self._unpin.atexit = False

    def close(self) -> None:
        """Unpin. The device must have finished with it; the memory goes when the last tensor in it goes."""
        unpin, self._unpin = self._unpin, None
        status = unpin() if unpin is not None else None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._array = None
        if status:
            raise PinnedMemoryError(f"{self.nbytes} bytes of host memory cannot be unpinned (CUDA error {status})")


def unregister(address: int) -> int:
    """Wait for the device, which may still read, and let go of the memory at `address`. Returns CUDA's status."""
    torch.cuda.synchronize()
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def forget_error() -> None:
    """The runtime keeps the error of a failed call for the next kernel that this thread starts: let it be this."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")

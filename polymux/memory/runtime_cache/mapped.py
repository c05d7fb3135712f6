"""An entry in memory: one read-only mapping that all processes of the host share, and, if wanted, known to the device.

The file is mapped whole, from its first byte, so every block is a range of whole pages. The mapping keeps the entry's
shared lock: an entry is in use until its memory is given up. Nothing may be written to the tensors; a write ends the
process, as writing to a constant of a program does.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Protocol

import torch

from polymux.errors import PinnedMemoryError
from polymux.memory.base import Arrival
from polymux.memory.pinned import forget_error
from polymux.memory.private_blocks import CopyStream
from polymux.memory.runtime_cache.entry import Entry
from polymux.memory.runtime_cache.packing import module_layout

logger = logging.getLogger(__name__)

_PROBES = 256  # places at which a file is looked at to see whether it is in the page cache
_READERS, _PIECE = 8, 16 * 2**20  # threads and bytes


class Registrar(Protocol):
    """The device's driver, as far as it locks host memory. Statuses are CUDA's: 0 is success."""

    def register(self, memory: torch.Tensor) -> int: ...

    def unregister(self, memory: torch.Tensor) -> int: ...

    def is_pinned(self, memory: torch.Tensor) -> bool: ...

    def synchronize(self) -> None: ...


class CudaRegistrar:
    """Registers memory as readable by a CUDA device. Without the read-only flag CUDA refuses a read-only mapping."""

    READ_ONLY = 0x08  # cudaHostRegisterReadOnly

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, memory: torch.Tensor) -> int:
        with torch.cuda.device(self._device):
            status = int(self._cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, self.READ_ONLY))
            if status != 0:
                forget_error()
            return status

    def unregister(self, memory: torch.Tensor) -> int:
        with torch.cuda.device(self._device):
            return int(self._cudart.cudaHostUnregister(memory.data_ptr()))

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class Mapping:
    """The memory of one entry. `memory` is the whole file (uint8), in which the blocks begin at `offsets`; `layout`
    says what they hold."""

    _never_unmapped: ClassVar[list[torch.Tensor]] = []

    def __init__(self, entry: Entry) -> None:
        fd, size = entry.file.fileno(), entry.layout.file_size
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            # The tensors own the mmap object; closing that by hand would unmap what they look at.
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.name = entry.path.name
        self.layout = module_layout(entry.layout)
        self._rest, *self.offsets = (block.offset for block in entry.layout.placed)
        self._file: io.FileIO | None = io.FileIO(os.dup(fd))
        self._registrar: Registrar | None = None

    @property
    def rest(self) -> torch.Tensor:
        """The bytes of all that is in no block (uint8)."""
        return self.memory[self._rest : self._rest + self.layout.rest.nbytes]

    def image(self, index: int) -> torch.Tensor:
        """The bytes of a block (uint8)."""
        start = self.offsets[index]
        return self.memory[start : start + self.layout.blocks[index].nbytes]

    def fileno(self) -> int:
        """The file, open for reading; closed with the mapping."""
        assert self._file is not None
        return self._file.fileno()

    @property
    def registered(self) -> bool:
        return self._registrar is not None

    def register(self, registrar: Registrar, limit: int) -> bool:
        """Let the device read all of the memory at full speed, or none of it if that takes more than `limit` bytes.

        False: the memory is as it was; the log says why. Raises PinnedMemoryError if it is not as it was.
        """
        size = self.memory.nbytes
        if size > limit:
            logger.info(
                "runtime cache: %s is not registered: %.2f GiB are more than the limit of %.2f GiB "
                "(--dlo-runtime-cache-pin-limit-gib)",
                *(self.name, size / 2**30, limit / 2**30),
            )
            return False
        _read_in(self.fileno(), size)
        status = registrar.register(self.memory)
        if status != 0:
            logger.warning("runtime cache: %s cannot be registered: CUDA error %d", self.name, status)
            return False
        self._registrar = registrar
        if not (registrar.is_pinned(self.memory) and registrar.is_pinned(self.memory[-1:])):
            self._unregister()
            logger.warning("runtime cache: %s was registered, but the device does not take it as such", self.name)
            return False
        return True

    def close(self) -> None:
        """Wait for the device, then give the memory up; if tensors still look at it, it goes with the last of them.

        Raises PinnedMemoryError if the driver does not let go of it; then it stays mapped.
        """
        if self._registrar is not None:
            self._registrar.synchronize()
            self._unregister()
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _unregister(self) -> None:
        assert self._registrar is not None
        status = self._registrar.unregister(self.memory)
        if status != 0:
            # The device may still read these pages. No destructor may unmap them: they go when the process does.
            self._never_unmapped.append(self.memory)
            raise PinnedMemoryError(f"runtime cache: {self.name} cannot be unregistered: CUDA error {status}")
        self._registrar = None


def _read_in(fd: int, size: int) -> None:
    """Bring a file into the page cache, by several threads. Registering would read it too, but page by page; samples
    tell whether there is anything to read."""
    probe = bytearray(1)
    try:
        for at in range(0, size, -(-size // _PROBES)):
            os.preadv(fd, [probe], at, os.RWF_NOWAIT)
    except BlockingIOError:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="polymux-read") as pool:
            for at in range(0, size, _PIECE):
                pool.submit(os.pread, fd, _PIECE, at)  # an error shows again when the device wants the pages
    except OSError:
        return  # a file system that cannot say: only slower


class MappedBlocks:
    """Blocks straight out of a mapping, one copy each. Implements `base.HostBlocks`.

    For a registered mapping, or a CPU. Takes the mapping over.
    """

    collective = False

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self._mapping = mapping
        self._copies = CopyStream(device)
        self.layout = mapping.layout
        self.slot_bytes = mapping.layout.largest

    @property
    def description(self) -> str:
        how = "registered" if self._mapping.registered else "mapped"
        return f"runtime cache {self._mapping.name}, {how}, {self._mapping.memory.nbytes / 2**30:.2f} GiB"

    def expect(self, order: Sequence[int]) -> None:
        """Everything is always ready."""

    def fetch(self, index: int, slot: torch.Tensor, free: torch.cuda.Event | None) -> Arrival:
        return self._copies.copy(self._mapping.image(index), slot, free)

    def close(self) -> None:
        self._copies.synchronize()
        self._mapping.close()

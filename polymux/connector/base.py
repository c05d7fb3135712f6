"""The interface of connectors, and what they have in common: tensors to bytes and back, and who still holds what."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from polymux.errors import StageDeadError
from polymux.parcel import Inline, Parcel, TensorInfo

Tensors = Mapping[str, "np.ndarray[Any, Any]"]

INLINE_BYTES = 2**16  # what is not larger travels in the message: that is quicker than any other way

Held = TypeVar("Held")


class Connector(ABC, Generic[Held]):
    """One end of an edge. The end that puts holds the bytes until the other one has used them up, or never will."""

    def __init__(self) -> None:
        self._held: dict[str, deque[Held | None]] = {}

    def put(self, key: str, tensors: Tensors) -> Parcel:
        """Make the tensors available, in the name of `key`. Raises GenerationError if there is no room."""
        started = time.perf_counter()
        arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        listed = [TensorInfo(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        nbytes = sum(array.nbytes for array in arrays.values())
        views = [array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.nbytes]
        held: Held | None = None
        if nbytes <= INLINE_BYTES:
            place: Any = Inline(b"".join(views))
        else:
            held, place = self._offer(views, nbytes)
        self._held.setdefault(key, deque()).append(held)
        return Parcel(listed, nbytes, place, time.perf_counter() - started)

    def get(self, parcel: Parcel) -> Tensors:
        """The tensors, which are the caller's own. Raises StageDeadError if they are not to be had any more."""
        if isinstance(parcel.place, Inline):
            data: bytes | bytearray = parcel.place.data
        else:
            data = self._fetch(parcel)
        if len(data) != parcel.nbytes:
            raise StageDeadError(f"{parcel.nbytes} bytes of another stage were expected, and there are {len(data)}")
        found, start = {}, 0
        for info in parcel.tensors:
            dtype = np.dtype(info.dtype)
            count = int(np.prod(info.shape, dtype=np.int64))
            found[info.name] = np.frombuffer(data, dtype, count, start).reshape(info.shape)
            start += count * dtype.itemsize
        return found

    def taken(self, key: str) -> None:
        """The other end has used up the oldest of what is held for `key`. Unknown keys are no error."""
        held = self._held.get(key)
        if held:
            self._drop(held.popleft())
            if not held:
                del self._held[key]

    def forget(self, key: str) -> None:
        """Nobody will ask for what is held for `key`."""
        for held in self._held.pop(key, ()):
            self._drop(held)

    def close(self) -> None:
        """Hold nothing any more."""
        for key in list(self._held):
            self.forget(key)

    def _drop(self, held: Held | None) -> None:
        if held is not None:
            self._withdraw(held)

    @abstractmethod
    def _offer(self, views: list[memoryview], nbytes: int) -> tuple[Held, Any]:
        """Make bytes available: what is held of them here, and where they are."""

    @abstractmethod
    def _fetch(self, parcel: Parcel) -> bytes | bytearray:
        """Get what was offered. Raises StageDeadError."""

    @abstractmethod
    def _withdraw(self, held: Held) -> None:
        """Let go of what was offered."""

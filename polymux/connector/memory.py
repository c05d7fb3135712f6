"""Between processes of one host: through memory that has no name.

A parcel is a file in memory (`memfd`) that the process which puts it holds open; the other one opens it through
/proc/PID/fd/N and copies what is in it. There is nothing to unlink: when the processes that have it open are gone,
however they ended, the kernel has the memory back.
"""

from __future__ import annotations

import os
import secrets

from polymux.connector.base import Connector
from polymux.errors import GenerationError, StageDeadError
from polymux.parcel import Parcel, Shared

TOKEN_BYTES = 16


class MemoryConnector(Connector[int]):
    """What is held is a file descriptor."""

    def _offer(self, views: list[memoryview], nbytes: int) -> tuple[int, Shared]:
        token = secrets.token_bytes(TOKEN_BYTES)
        fd = os.memfd_create("polymux", os.MFD_CLOEXEC)
        try:
            for view in (memoryview(token), *views):
                while view:
                    view = view[os.write(fd, view) :]
        except OSError as error:
            os.close(fd)
            raise GenerationError(f"no memory for {nbytes} bytes between stages: {error}") from None
        return fd, Shared(os.getpid(), fd, token)

    def _fetch(self, parcel: Parcel) -> bytearray:
        place = parcel.place
        assert isinstance(place, Shared)
        data = bytearray(parcel.nbytes)
        try:
            with open(f"/proc/{place.pid}/fd/{place.fd}", "rb", buffering=0) as file:
                if file.read(TOKEN_BYTES) != place.token:
                    raise StageDeadError("what another stage has handed on is not there any more")
                view, done = memoryview(data), 0
                while done < len(data) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise StageDeadError(f"what another stage has handed on is not there any more: {error}") from None
        return data[:done]

    def _withdraw(self, held: int) -> None:
        os.close(held)

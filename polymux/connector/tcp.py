"""Between two hosts, and where memory without a name does not exist: over TCP.

The process that puts listens, and answers whoever knows the token of a parcel. A token is 16 random bytes that travel
with the control messages only; the bytes themselves are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading

from polymux.connector.base import Connector
from polymux.errors import ConfigError, StageDeadError
from polymux.parcel import Parcel, Remote

TOKEN_BYTES = 16
TIMEOUT_S = 30.0  # for a peer that says nothing
LENGTH = struct.Struct("!Q")


class TcpConnector(Connector[bytes]):
    """What is held is a token. The listener starts with the first parcel that does not fit into a message."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host`: the address of this process, as the other one reaches it."""
        super().__init__()
        self._host = host
        self._listener: socket.socket | None = None
        self._offers: dict[bytes, bytes] = {}

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes up whoever waits in accept
            self._listener.close()
            self._listener = None

    def _offer(self, views: list[memoryview], nbytes: int) -> tuple[bytes, Remote]:
        if self._listener is None:
            try:
                self._listener = socket.create_server((self._host, 0))
            except OSError as error:
                raise ConfigError(f"connector_host={self._host!r}: {error}", param="connector_host") from None
            threading.Thread(target=self._serve, args=(self._listener,), name="connector", daemon=True).start()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = b"".join(views)
        return token, Remote(self._host, self._listener.getsockname()[1], token)

    def _withdraw(self, held: bytes) -> None:
        self._offers.pop(held, None)

    def _fetch(self, parcel: Parcel) -> bytearray:
        place = parcel.place
        assert isinstance(place, Remote)
        try:
            with socket.create_connection((place.host, place.port), TIMEOUT_S) as connection:
                connection.sendall(place.token)
                (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
                if length != parcel.nbytes:
                    raise StageDeadError("what another stage has handed on is not there any more")
                return _exactly(connection, length)
        except OSError as error:
            raise StageDeadError(f"what another stage has handed on cannot be had: {error}") from None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), name="connector", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, StageDeadError):
            connection.settimeout(TIMEOUT_S)
            token = bytes(_exactly(connection, TOKEN_BYTES))
            found = [data for known, data in list(self._offers.items()) if hmac.compare_digest(known, token)]
            data = found[0] if found else b""
            connection.sendall(LENGTH.pack(len(data)))
            connection.sendall(data)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise StageDeadError("the other stage has closed the connection")
        done += count
    return data

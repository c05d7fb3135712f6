"""Sockets between processes of several hosts: one of them listens, and the others come to it.

Who comes says a secret and which place is its own. A connection over which nothing can be sent any more is lost within
seconds, as that to a process of this host is. Knows neither who starts the processes nor what they say.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Collection

from polymux.errors import StageDeadError

SECRET_BYTES = 16
PLACE = struct.Struct("!I")
GREETING_S = 10.0  # for one that has connected to say who it is
PROBE_S, PROBES = 2, 3  # of a connection that is silent


class Gathering:
    """The listening end."""

    def __init__(self, host: str) -> None:
        """`host`: the address of this process, as the others reach it. Raises StageDeadError."""
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise StageDeadError(f"nobody can be waited for at {host!r}: {error}") from None
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self.secret = secrets.token_bytes(SECRET_BYTES)

    def wait_for(self, places: Collection[int], seconds: float) -> dict[int, socket.socket]:
        """A connection from each. Nobody can come after this. Raises StageDeadError if one does not come."""
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + seconds
        with self._listener:
            while missing := set(places) - found.keys():
                self._listener.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    raise StageDeadError(f"of the processes of this stage {sorted(missing)} have not come") from None
                place = self._place_of(connection)
                if place in missing:
                    found[place] = watched(connection)
                else:
                    connection.close()
        return found

    def _place_of(self, connection: socket.socket) -> int | None:
        """None: it is none of ours."""
        size = SECRET_BYTES + PLACE.size
        connection.settimeout(GREETING_S)
        with contextlib.suppress(OSError):
            said = connection.recv(size, socket.MSG_WAITALL)
            connection.settimeout(None)
            if len(said) == size and hmac.compare_digest(said[:SECRET_BYTES], self.secret):
                (place,) = PLACE.unpack(said[SECRET_BYTES:])
                return int(place)
        return None


def come(address: tuple[str, int], secret: bytes, place: int, seconds: float = GREETING_S) -> socket.socket:
    """The other end. Raises StageDeadError."""
    try:
        connection = socket.create_connection(address, seconds)
        connection.settimeout(None)
        connection.sendall(secret + PLACE.pack(place))
    except OSError as error:
        raise StageDeadError(
            f"{address[0]}:{address[1]}, where the stage gathers, cannot be reached: {error}"
        ) from None
    return watched(connection)


def watched(connection: socket.socket) -> socket.socket:
    """Have it end when the other host is gone, too, which says nothing when it goes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # not on macOS
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PROBE_S * (PROBES + 1))
    return connection

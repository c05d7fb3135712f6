"""Connections to public addresses only: a name is resolved once, every address is checked, and a checked one is used.

The network part of an HTTP client. TLS lies above it and is verified against the name, so nothing is lost by
connecting to an address; and no name can mean one thing when it is checked and another when it is used.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpcore2

from polymux.media.addresses import AddressRule

Resolve = Callable[[str, int], Awaitable[list[str]]]
SocketOption = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]

RESOLVING_THREADS = 16
ATTEMPT_S = 5.0  # for one of several addresses


class AddressRefusedError(Exception):
    """A name leads to an address that must not be connected to."""


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects where `rule` allows it. A name with one bad address among its addresses is refused as a whole."""

    def __init__(self, rule: AddressRule, resolve: Resolve) -> None:
        self._rule = rule
        self._resolve = resolve
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Raises AddressRefusedError, and httpcore's errors if nobody answers."""
        addresses = await self._resolve(host, port)
        if not all(self._rule.allows(address) for address in addresses):
            raise AddressRefusedError
        last: Exception = httpcore2.ConnectError("the name has no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, ATTEMPT_S, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                last = error
        raise last

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[SocketOption] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        raise AddressRefusedError

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Resolver:
    """The addresses that this machine knows for a name, in the order in which to try them.

    Asks in threads of its own: a name whose servers do not answer holds one for as long as the C library waits, and
    such names must not be able to hold up other work.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVING_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Every spelling of an address that the C library understands (decimal, octal, hexadecimal) comes back as
        the address it stands for. Raises httpcore's ConnectError for a name that does not exist."""
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except (OSError, UnicodeError):
            raise httpcore2.ConnectError("the name does not exist") from None
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

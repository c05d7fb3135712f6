"""Files from http and https URLs, within limits of bytes, redirects and time, and never from inside this network.

A bare client on purpose: no cookies, no credentials, no proxies of the environment, no reuse of connections, and no
decompression (the server is asked for plain bytes, and an answer that is encoded all the same is refused).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator

import httpcore2
import httpx2

from polymux.errors import ConfigError, InvalidRequestError
from polymux.media.addresses import AddressRule
from polymux.media.connect import AddressRefusedError, CheckedNetwork, Resolve, Resolver
from polymux.server_config import MediaConfig
from polymux.version import VERSION

MAX_URL = 8192  # characters
MAX_HOST = 253  # characters, as names have them
MAX_CONNECTIONS = 64  # a fetch beyond them waits, within its time

_HEADERS = [
    (b"User-Agent", f"polymux/{VERSION}".encode()),
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
]
_HOST = re.compile(r"[^\s/:@?#%*\\\[\]]+")
_REDIRECTS = (301, 302, 303, 307, 308)


class WebSource:
    """Fetches. `resolve` and `tls` are for tests; by default they are this machine's own."""

    def __init__(
        self, config: MediaConfig, *, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Raises ConfigError for an allowed domain that is none."""
        self._config = config
        self._domains = frozenset(map(_domain, config.allowed_media_domains))
        self._resolver = Resolver()
        self._network = CheckedNetwork(AddressRule(config.allowed_media_networks), resolve or self._resolver)
        self._tls = tls
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._opening = asyncio.Lock()

    async def fetch(self, url: str, *, param: str, max_bytes: int) -> bytes:
        """The file. Raises InvalidRequestError that names `param` for whatever is in the way."""
        if not self._config.media_fetch:
            raise _refuse(param, "media are not fetched from URLs here; send a data: URL")
        try:
            async with asyncio.timeout(self._config.media_fetch_timeout):
                return await self._follow(_parse(url, param), param, max_bytes)
        except TimeoutError:
            allowed = f"{self._config.media_fetch_timeout:g} s (--media-fetch-timeout)"
            raise _refuse(param, f"the URL could not be fetched within {allowed}") from None
        except AddressRefusedError:
            why = "it leads to an address that is not public (--allowed-media-networks)"
            raise _refuse(param, f"the URL is not allowed: {why}") from None
        except (httpcore2.NetworkError, httpcore2.TimeoutException):
            raise _refuse(param, "the URL could not be fetched: no connection to its server") from None
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol):
            raise _refuse(param, "the URL could not be fetched: its server does not speak HTTP properly") from None

    async def aclose(self) -> None:
        self._resolver.close()
        if self._pool is not None:
            await self._pool.aclose()

    async def _follow(self, url: httpx2.URL, param: str, max_bytes: int) -> bytes:
        for _ in range(self._config.max_media_redirects + 1):
            self._check_host(url, param)
            async with self._get(url) as answer:
                if answer.status not in _REDIRECTS:
                    return await _body(answer, param, max_bytes)
                url = _redirected(url, answer, param)
        allowed = f"allowed are {self._config.max_media_redirects} (--max-media-redirects)"
        raise _refuse(param, f"the URL redirects too often: {allowed}")

    def _check_host(self, url: httpx2.URL, param: str) -> None:
        host = _plain_host(url)
        parents = (host.split(".", n)[-1] for n in range(1, host.count(".") + 1))
        if self._domains and host not in self._domains and not any("*." + p in self._domains for p in parents):
            raise _refuse(param, "the URL is not allowed: its host is not one of --allowed-media-domains")

    @contextlib.asynccontextmanager
    async def _get(self, url: httpx2.URL) -> AsyncIterator[httpcore2.Response]:
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        headers = [(b"Host", url.netloc), *_HEADERS]
        async with (await self._connections()).stream("GET", target, headers=headers) as answer:
            yield answer

    async def _connections(self) -> httpcore2.AsyncConnectionPool:
        async with self._opening:
            if self._pool is None:
                # Reads this machine's certificates: not before they are needed, and not in the event loop.
                tls = self._tls or await asyncio.to_thread(httpcore2.default_ssl_context)
                self._pool = httpcore2.AsyncConnectionPool(
                    ssl_context=tls,
                    max_connections=MAX_CONNECTIONS,
                    max_keepalive_connections=0,
                    network_backend=self._network,
                )
        return self._pool


def _parse(text: str, param: str) -> httpx2.URL:
    """An http(s) URL with a host and nothing that must not be sent. Raises InvalidRequestError."""
    if len(text) > MAX_URL:
        raise _refuse(param, f"the URL has {len(text)} characters: allowed are {MAX_URL}")
    try:
        url = httpx2.URL(text)
        host = url.raw_host.decode("ascii")
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        raise _refuse(param, "not a valid URL") from None
    if url.scheme not in ("http", "https"):
        raise _refuse(param, "the URL must be http or https")
    if not host or "%" in host or len(host) > MAX_HOST or not (url.port is None or 0 < url.port < 65536):
        raise _refuse(param, "not a valid URL: its host or port is not one")
    if url.userinfo:
        raise _refuse(param, "the URL holds a user name or password, which would not be sent")
    return url


def _redirected(url: httpx2.URL, answer: httpcore2.Response, param: str) -> httpx2.URL:
    location = next((value for name, value in answer.headers if name.lower() == b"location"), b"")
    if not location:
        raise _refuse(param, "the URL redirects to nowhere")
    try:
        target = str(url.join(location.decode("latin-1")))
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        raise _refuse(param, "the URL redirects to what is not a valid URL") from None
    return _parse(target, param)


async def _body(answer: httpcore2.Response, param: str, max_bytes: int) -> bytes:
    if answer.status != 200:
        raise _refuse(param, f"the URL could not be fetched: its server answered {answer.status}")
    headers = {name.lower(): value.decode("latin-1").strip().lower() for name, value in answer.headers}
    if headers.get(b"content-encoding", "identity") not in ("identity", ""):
        raise _refuse(param, "the URL could not be fetched: its server compresses, without being asked to")
    declared = headers.get(b"content-length", "0")
    body = bytearray()
    if not declared.isdecimal() or int(declared) <= max_bytes:
        async for chunk in answer.aiter_stream():
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise _refuse(param, f"the file has more than {max_bytes} bytes")


def _plain_host(url: httpx2.URL) -> str:
    return url.raw_host.decode("ascii").rstrip(".")


def _domain(given: str) -> str:
    """A domain of the configuration in the form in which hosts are compared."""
    below = "*." if given.startswith("*.") else ""
    host = given.removeprefix(below)
    if _HOST.fullmatch(host):
        with contextlib.suppress(httpx2.InvalidURL, UnicodeError, ValueError):
            return below + _plain_host(httpx2.URL(f"http://{host}"))
    name = "allowed_media_domains"
    raise ConfigError(f"{name}: {given!r} must be a host, such as example.org or *.example.org", param=name)


def _refuse(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}", param=param)

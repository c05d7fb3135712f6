"""Who may use the server: API keys, and pages that browsers show from elsewhere.

Where keys are set, every request must bring one, but for the few paths in OPEN. Where none is set, whoever reaches the
port may use it, and a browser reaches ports of its own machine: so a page of another origin may not change anything
here unless `--cors-allow-origins` names it. Knows no bodies: it decides before one is read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from polymux.config import api_keys
from polymux.errors import AuthenticationError, ForbiddenOriginError, PolymuxError
from polymux.server.errors import error_response
from polymux.server_config import AccessConfig

OPEN = frozenset({"/", "/health", "/live", "/ready"})  # the page at / asks its user for a key
OPEN_FOLDERS = (
    "/playground/",  # what that page consists of
    "/v1/files/images/",  # the name of a picture is as good as a key, and an <img> sends none
)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Access:
    """ASGI middleware: lets a request pass, or answers 401 or 403."""

    def __init__(self, app: ASGIApp, config: AccessConfig, host: str) -> None:
        """`host`: the name that the server listens on. Raises ConfigError if there is a file of keys that is none."""
        self.app = app
        self._keys = tuple(_digest(key.encode()) for key in api_keys(config))
        self._open = OPEN | {"/metrics"} if config.metrics_without_api_key else OPEN
        self._origins = config.cors_allow_origins
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> PolymuxError | None:
        headers = Headers(scope=scope)
        # A page may open a WebSocket to anywhere, and read what comes back: that is never safe.
        safe = scope["type"] == "http" and scope["method"] in SAFE_METHODS
        if not self._keys:
            return None if safe else self._foreign(headers)
        path = scope["path"]
        if safe and (path in self._open or path.startswith(OPEN_FOLDERS)):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return AuthenticationError("an API key is needed: send the header Authorization: Bearer KEY")
        if not self._is_known(key.strip()):
            return AuthenticationError("the API key is wrong")
        return None

    def _is_known(self, key: str) -> bool:
        """Takes as long for a wrong key as for a right one. Headers are Latin-1, keys are ASCII."""
        given = _digest(key.encode("latin-1"))
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0  # any() would stop at the first

    def _foreign(self, headers: Headers) -> PolymuxError | None:
        """Why the page that asks, if it is a page, may not."""
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        page = _split(origin)
        if page is not None and page[0] == headers.get("host", "").lower() and self._is_own(page[1]):
            return None
        why = "this origin is not allowed: name it in --cors-allow-origins, or protect the server with --api-key"
        return ForbiddenOriginError(f"{origin[:200]!r}: {why}")

    def _is_own(self, name: str) -> bool:
        """Whether a page of ours can have that host. Any other name may be one that leads to us for a trick."""
        if name in ("localhost", self._host):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Cors(CORSMiddleware):
    """Lets pages of the origins in `config` use the server, and answers their browsers' questions first."""

    def __init__(self, app: ASGIApp, config: AccessConfig) -> None:
        super().__init__(
            app,
            allow_origins=config.cors_allow_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # SDKs send many of their own; what protects is the key, which no browser adds
            expose_headers=("x-request-id", "retry-after"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        what = "this origin, or what its page wants to send, is not allowed (--cors-allow-origins)"
        return error_response(ForbiddenOriginError(what))


def _split(origin: str) -> tuple[str, str] | None:
    """Host with port, and host alone, in lower case; None for what has none, such as null."""
    try:
        parts = urlsplit(origin)
        return (parts.netloc.lower(), parts.hostname) if parts.hostname else None
    except ValueError:
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

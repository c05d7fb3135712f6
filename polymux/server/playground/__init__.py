"""GET /: a page to try the model with, and the files that it consists of.

The page is a client like any other: what it knows of the model comes from the public routes. Its files are read once,
at start. They hold nothing secret, so no key is needed to fetch them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from polymux.server.state import ServerState

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# blob: shows results and chosen files, data: is what style sheets may use for small shapes.
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again with its tag: after an upgrade all files are new at once
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def assets() -> dict[str, Asset]:
    """The files of the page by name."""
    found = {}
    for file in resources.files(__package__).iterdir():
        media_type = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            found[file.name] = Asset(file.read_bytes(), media_type)
    return found


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = assets()

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """The page."""
        return _answer(request, files["index.html"])

    @router.api_route("/playground/{name}", methods=["GET", "HEAD"])
    async def file(request: Request, name: str) -> Response:
        """One of its scripts and styles. Names are looked up, never taken as a path."""
        if name not in files:
            raise HTTPException(404)
        return _answer(request, files[name])

    return router


def _answer(request: Request, asset: Asset) -> Response:
    headers = HEADERS | {"etag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):  # a list of tags, each in quotes
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)

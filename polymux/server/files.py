"""GET /v1/files/images/NAME: the pictures of answers with `response_format` "url".

Whoever has the URL has the picture: its name cannot be guessed, and an <img> sends no key.
"""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from polymux.server.errors import responses
from polymux.server.state import ServerState

PATH = "/v1/files/images"

_CONTENT: dict[str, dict[str, str]] = {f"image/{kind}": {} for kind in ("png", "jpeg", "webp")}
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.head(PATH + "/{name}", include_in_schema=False)
    @router.get(
        PATH + "/{name}",
        response_class=Response,
        responses={200: {"content": _CONTENT}, **responses(404)},
    )
    async def image_file(name: str) -> Response:
        """A picture that was made a while ago."""
        found = state.image_files.get(name)
        if found is None:
            raise HTTPException(404, "there is no such picture, or no more")
        picture, seconds = found
        headers = {"cache-control": f"private, max-age={seconds}, immutable", "x-content-type-options": "nosniff"}
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    return router


def url_of(name: str, request: Request, public_url: str | None) -> str:
    """Where clients find a picture: below `public_url`, or else where this request was sent to.

    Headers by which a proxy says what it was asked for are not believed: anybody can send them.
    """
    if public_url is None:
        host = request.headers.get("host", "")
        if not _HOST.fullmatch(host):
            address, port = request.scope.get("server") or ("localhost", None)
            host = (f"[{address}]" if ":" in address else address) + ("" if port is None else f":{port}")
        public_url = f"{request.url.scheme}://{host}"
    return f"{public_url.rstrip('/')}{PATH}/{name}"

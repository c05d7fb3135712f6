"""An answer that is a file which grows while it is sent.

The status is only decided when the source has given its first bytes: what goes wrong before that is an ordinary error
answer. What goes wrong later ends the connection without the mark of a complete answer, so that nobody takes a part for
the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polymux.errors import PolymuxError


class ByteStream(Response):
    """Sends `first`, then what `source` gives; closes `source`, however it ends."""

    def __init__(
        self, first: bytes, source: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._first, self._source = first, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._source):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for piece in self._source:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except PolymuxError as error:
                scope.setdefault("state", {})["ended"] = error.code  # for the log; the server closes the connection
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

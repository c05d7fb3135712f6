"""A session over a WebSocket: JSON messages of known types in, messages out; how it ends, and what it may cost.

Whoever derives from it says which messages there are, and what they do. Messages are read at all times, so that a
client that leaves is noticed at once; so what they hold must be limited by whoever keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, ClassVar, Literal

from fastapi import WebSocket
from pydantic import BaseModel, ValidationError
from starlette.websockets import WebSocketDisconnect, WebSocketState

from polymux.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PayloadTooLargeError,
    PolymuxError,
    ReceiveTimeoutError,
)
from polymux.server.deadline import exceeded
from polymux.server.errors import error_body, from_validation
from polymux.server.json_guard import check_json
from polymux.server.protocol import Body, ErrorDetail
from polymux.server_config import HttpConfig
from polymux.spelling import shown

OVER, POLICY, FAILED = 1000, 1008, 1011  # why a WebSocket is closed
FRAME = 256 * 1024  # bytes of one binary message: some clients take no more than a megabyte


class SessionError(BaseModel):
    """A message was wrong, or the session ends for a reason of ours."""

    type: Literal["error"] = "error"
    error: ErrorDetail


class SessionOver(Exception):
    """The session is to be closed."""


class SocketSession:
    """One connection. `run` returns when it is over, however it ends."""

    messages: ClassVar[dict[str, type[Body]]] = {}
    longest: ClassVar[dict[str, int]] = {}  # bytes of a message, by its type; of others, as long as the server takes

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.limits: HttpConfig = socket.state.limits
        self.named: str | None = None  # what the client calls the message that is being read, if it does (`event_id`)

    async def take(self, message: Body) -> None:
        """What a message does. Raises PolymuxError for one that is wrong, and SessionOver."""
        raise NotImplementedError

    async def work(self) -> None:
        """What goes on beside the reading of messages; cancelled at the end."""
        raise NotImplementedError

    def patience(self) -> float | None:
        """Seconds that may pass until the next message; None: it is our turn."""
        raise NotImplementedError

    def complaint(self, error: PolymuxError) -> BaseModel:
        """How an error is told."""
        return SessionError(error=error_body(error).error)

    async def run(self) -> None:
        await self.socket.accept()
        reading, working = asyncio.create_task(self._read()), asyncio.create_task(self.work())
        code = OVER
        try:
            async with asyncio.timeout_at(self.socket.state.deadline):
                await asyncio.wait((reading, working), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, working):
                if task.done():
                    task.result()
        except (WebSocketDisconnect, SessionOver):
            pass
        except TimeoutError:
            code = await self._last_word(exceeded(), POLICY)
        except PolymuxError as error:
            code = await self._last_word(error, POLICY if error.status < 500 else FAILED)
        except Exception:
            code = await self._last_word(PolymuxError("internal error"), FAILED)
            raise  # for the log
        finally:
            for task in (reading, working):
                task.cancel()
            await asyncio.gather(reading, working, return_exceptions=True)
            await self._close(code)

    async def tell(self, event: BaseModel) -> None:
        await self._sent(self.socket.send_text(event.model_dump_json()))

    async def tell_bytes(self, data: bytes) -> None:
        for start in range(0, len(data), FRAME):
            await self._sent(self.socket.send_bytes(data[start : start + FRAME]))

    async def _sent(self, sending: Any) -> None:
        """Raises SessionOver if the client takes nothing."""
        try:
            async with asyncio.timeout(self.limits.send_timeout):
                await sending
        except (TimeoutError, RuntimeError):  # RuntimeError: the connection is closed already
            raise SessionOver from None

    async def _read(self) -> None:
        while True:
            self.named = None
            try:
                await self.take(self._parsed(await self._next()))
            except (ReceiveTimeoutError, DeadlineExceededError):
                raise
            except PolymuxError as error:
                await self.tell(self.complaint(error))

    async def _next(self) -> dict[str, Any]:
        """Raises WebSocketDisconnect, and ReceiveTimeoutError when nothing comes for too long."""
        receiving = asyncio.ensure_future(self.socket.receive())
        try:
            while True:
                patience = self.patience()
                done, _ = await asyncio.wait((receiving,), timeout=_LOOK_S if patience is None else patience)
                if done:
                    break
                if patience is not None and self.patience() is not None:
                    raise ReceiveTimeoutError(f"no message came for {patience:g} s")
        finally:
            if not receiving.done():
                receiving.cancel()
        message: dict[str, Any] = dict(receiving.result())
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", OVER))
        return message

    def _parsed(self, message: dict[str, Any]) -> Body:
        text = message.get("text")
        if text is None:
            raise InvalidRequestError("a binary message: messages must be JSON")
        data = text.encode(errors="surrogatepass")
        check_json(data, max_depth=self.limits.max_json_depth, max_values=self.limits.max_json_values)
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidRequestError(f"the message is not valid JSON: {error}") from None
        kind, name = (value.get("type"), value.get("event_id")) if isinstance(value, dict) else (None, None)
        self.named = name[:_MOST_NAMED].encode(errors="replace").decode() if isinstance(name, str) else None
        model = self.messages.get(kind) if isinstance(kind, str) else None
        if model is None or not isinstance(kind, str):
            raise InvalidRequestError(f"type={shown(kind)}: allowed are {', '.join(self.messages)}", param="type")
        most = self.longest.get(kind)
        if most is not None and len(data) > most:
            raise PayloadTooLargeError(f"{kind}: {len(data)} bytes: allowed are {most}", param="type")
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            raise from_validation(error, model) from None

    async def _last_word(self, error: PolymuxError, code: int) -> int:
        with contextlib.suppress(SessionOver, WebSocketDisconnect):
            await self.tell(self.complaint(error))
        return code

    async def _close(self, code: int) -> None:
        if self.socket.client_state is WebSocketState.CONNECTED is self.socket.application_state:
            with contextlib.suppress(SessionOver, WebSocketDisconnect):
                await self._sent(self.socket.close(code))


_MOST_NAMED = 512  # characters
_LOOK_S = 1.0  # how often it is looked whether it is the client's turn again

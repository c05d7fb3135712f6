"""One generation on behalf of one connection: it ends when the client leaves, or when its time is over.

One way for the plain answer and for streams: `events`. Knows neither what is generated nor how the answer looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from fastapi import Request

from polymux.errors import GenerationError, RequestAbortedError
from polymux.omni_output import OmniPreview, OmniRequestOutput
from polymux.prompts import Params, Prompt
from polymux.request import Progress
from polymux.server.deadline import deadline_of, exceeded
from polymux.server.session import session_of
from polymux.server.state import Generator

T = TypeVar("T")


def events(
    omni: Generator, request: Request, prompt: Prompt, params: Params, partial_images: int = 0
) -> AsyncGenerator[Progress | OmniPreview | OmniRequestOutput]:
    """What the generator tells, and then the output. Raises what it raises, RequestAbortedError if the client left, and
    DeadlineExceededError if its time was over.

    Close it, and the request is aborted in the engine.
    """
    # Clients may send the same x-request-id twice at once; the engine's ids are unique.
    engine_id = f"{request.state.request_id}-{uuid.uuid4().hex[:8]}"
    session = session_of(request)
    return while_connected(
        request, omni.generate(prompt, params, request_id=engine_id, partial_images=partial_images, **session)
    )


async def generate(omni: Generator, request: Request, prompt: Prompt, params: Params) -> OmniRequestOutput:
    """The output of `events`."""
    async with contextlib.aclosing(events(omni, request, prompt, params)) as all_events:
        async for event in all_events:
            if isinstance(event, OmniRequestOutput):
                return event
    raise GenerationError("the generation ended without an output")


async def connected(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns. When the client leaves or its time is over, ends it and raises as `while_connected` does."""

    async def only() -> AsyncGenerator[T]:
        yield await work

    async with contextlib.aclosing(while_connected(request, only())) as items:
        return await anext(items)


async def while_connected(request: Request, source: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The items of `source`, which is closed at the end. Raises RequestAbortedError as soon as the client has left, and
    DeadlineExceededError when the request's time is over."""
    deadline, now = deadline_of(request), asyncio.get_running_loop().time
    gone = asyncio.create_task(_disconnected(request))
    item: asyncio.Future[T] | None = None
    try:
        while True:
            item = asyncio.ensure_future(anext(source))
            left = None if deadline is None else max(0.0, deadline - now())
            done, _ = await asyncio.wait((item, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise RequestAbortedError("the client left")
            if not done:
                raise exceeded()
            try:
                value = item.result()
            except StopAsyncIteration:
                return
            yield value
    finally:
        gone.cancel()
        if item is not None:
            item.cancel()  # ends the source where it waits
        await asyncio.gather(gone, *([item] if item is not None else []), return_exceptions=True)
        await source.aclose()


async def _disconnected(request: Request) -> None:
    """Returns when the client is gone. The body was read before, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
